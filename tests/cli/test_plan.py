"""``elastictrain plan``: the layouts that fit, without starting anything; bad input is one line and exit code 2."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from elastictrain.cli import main as main_module
from elastictrain.cli.checks import parse_size
from elastictrain.errors import UsageError
from tests.cli.test_usage import ROOT, refused, tree

TASK = """
import torch
from torch import nn
from elastictrain import Task

class Net(Task):
    batch_size = 32

    def __init__(self, width: int = 64, depth: int = 4, bad: bool = False):
        super().__init__()
        self.width, self.depth = width, depth
        if bad:
            raise KeyError("no such column")

    def configure_model(self):
        self.into = nn.Linear(8, self.width)
        self.blocks = nn.Sequential(*(Block(self.width) for _ in range(self.depth)))
        self.out = nn.Linear(self.width, 1)

    def tensor_parallel_plan(self):
        return {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}

    def forward(self, x): return self.out(self.blocks(self.into(x)))
    def loss(self, outputs, batch): return (outputs - batch[1]).square().mean()
    def train_dataset(self): return torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
    def configure_optimizers(self): return torch.optim.AdamW(self.parameters())

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x): return x + self.down(self.up(x).relu())
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in list(os.environ):
        if name.startswith(("ELASTICTRAIN_", "PET_")):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(TASK)
    (tmp_path / "plain.py").write_text("print('hello')")
    return tmp_path


def printed(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as end:
        main_module.main(["plan", *argv])
    out, err = capsys.readouterr()
    assert end.value.code == 0, err
    return out


def test_a_plain_table(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = tree(here)
    out = printed(capsys, "net.py", "--nproc-per-node", "4", "--device-memory", "3MiB", "--micro-batch-size", "4")
    lines = out.splitlines()
    assert lines[0] == (
        "net.py:Net: 4 ranks, 3 MiB each (2.7 MiB usable), 520 KiB of parameters, 8 microbatches in a step"
    )
    head = ["mesh", "parameters", "gradients", "optimizer", "communication", "activations", "total"]
    assert lines[1].split() == head
    assert lines[2].startswith("dp_replicate=4") and lines[2].endswith("auto")
    assert lines[-3] == "host memory of a node: saves take up to 3 MiB; --snapshot-every up to 6.1 MiB more"
    assert lines[-1].startswith("auto takes dp_replicate=4: every rank keeps the whole state: ")
    assert "layouts fit; --all shows" in lines[-2]
    assert len(set(map(len, [line[: lines[1].index("total") + 5] for line in lines[1:-3]]))) == 1, "columns line up"
    assert tree(here) == before, "looking leaves nothing behind"
    assert not torch.distributed.is_initialized()


def test_json_says_the_same(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["net.py:Net", "--nproc-per-node", "2", "--nnodes", "2", "--device-memory", "7MB", "--set", "width=128"]
    found: dict[str, Any] = json.loads(printed(capsys, *argv, "--json"))
    assert (found["ranks"], found["ranks_per_node"], found["device_bytes"]) == (4, 2, 7_000_000)
    width = 128
    block = 8 * width * width + 5 * width
    parameters = 4 * (9 * width + 4 * block + width + 1)
    assert found["parameter_bytes"] == parameters
    assert found["notes"] == []
    by_mesh = {tuple(layout["mesh"].values()): layout for layout in found["layouts"]}
    one = by_mesh[1, 4, 1, 1, 1]["bytes"]
    assert one["parameters"] == one["gradients"] == parameters
    assert 0 <= one["optimizer"] - 2 * parameters < 200, "two moments, and a counter each"
    assert one["total"] == sum(value for kind, value in one.items() if kind != "total")
    assert by_mesh[1, 1, 4, 1, 1]["bytes"]["parameters"] == pytest.approx(parameters / 4, rel=0.01)
    cut = by_mesh[1, 2, 1, 1, 2]["bytes"]["parameters"]
    assert cut == pytest.approx(parameters / 2, rel=0.05), "tensor parallelism cuts the blocks in two"
    assert by_mesh[1, 1, 1, 1, 4]["problem"] == "tp=4 is not within a node of 2"
    chosen = found["chosen"]
    assert chosen in found["layouts"] and chosen["fits"] and chosen["bytes"]["total"] <= found["usable_bytes"]


def test_one_layout_alone(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["net.py", "--nproc-per-node", "4", "--device-memory", "1MiB", "--mesh", "dp_shard=2,dp_replicate=-1"]
    out = printed(capsys, *argv)
    assert "dp_replicate=2, dp_shard=2" in out and "does not fit" in out
    assert "0 of 1 layouts fit\nthis is dp_replicate=2, dp_shard=2: " in out
    assert len(json.loads(printed(capsys, *argv, "--json"))["layouts"]) == 1


def test_callbacks_count(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["net.py", "--nproc-per-node", "1", "--device-memory", "1GiB", "--json", "--set", "depth=8"]
    argv += ["--micro-batch-size", "32"]

    def activations(*more: str) -> int:
        return json.loads(printed(capsys, *argv, *more))["chosen"]["bytes"]["activations"]

    plain, less = activations(), activations("--callback", "activation-checkpointing")
    low = activations("--callback", "mixed-precision:compute=bf16")
    assert less < 0.6 * plain
    assert low != plain


def test_everything_and_a_terminal(here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    argv = ["net.py", "--nproc-per-node", "4", "--device-memory", "1MiB"]
    assert "does not fit" in printed(capsys, *argv, "--all")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "160")
    assert "\x1b[" in printed(capsys, *argv)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "num_nodes", "billions", "taken"),
    [
        ("Llama3_405B", 2048, 405.9, {"dp_replicate": 128, "dp_shard": 16, "tp": 8}),
        ("Bloom176B", 48, 176.2, {"dp_replicate": 2, "dp_shard": 192}),
    ],
)
def test_a_published_model_is_planned_in_a_minute(
    model: str, num_nodes: int, billions: float, taken: dict[str, int]
) -> None:
    """Of CPU time, and in 4 GiB: no weight is ever made."""
    command = [sys.executable, "-m", "elastictrain", "plan", f"examples/published_models.py:{model}", "--json"]
    command += ["--nnodes", str(num_nodes), "--nproc-per-node", "8", "--device-memory", "80GB"]
    command += ["--micro-batch-size", "1", "--callback", "mixed-precision:compute=bf16"]
    command += ["--callback", "activation-checkpointing"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        found = json.loads(process.stdout.read())
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    assert found["parameter_bytes"] / 4e9 == pytest.approx(billions, abs=0.05)
    assert {
        axis: size for axis, size in found["chosen"]["mesh"].items() if size > 1
    } == taken  # as docs/planning.md has it
    print(f"{model}: {used.ru_utime + used.ru_stime:.1f} s of CPU time, {used.ru_maxrss / 2**20:.2f} GiB")
    assert used.ru_utime + used.ru_stime < 60
    assert used.ru_maxrss / 2**20 < 4  # ru_maxrss is in KiB


BAD = [
    ([], "Missing argument 'TARGET'"),
    (["nte.py"], "nte.py does not exist; did you mean net.py?"),
    (["plain.py"], "plain.py defines no Task: name a class"),
    (["net.py", "--nnodes", "1:4"], "--nnodes 1:4: plan looks at one number of nodes"),
    (["net.py", "--nproc-per-node", "0"], "--nproc-per-node 0: write a number of workers"),
    (["net.py", "--device-memory", "80 parsecs"], "--device-memory 80 parsecs: write a size, such as 80GiB"),
    (["net.py", "--device-memory", "0"], "--device-memory 0: write a size"),
    (["net.py", "--global-batch-size", "4", "--micro-batch-size", "8"], "--global-batch-size 4 is smaller than"),
    (["net.py", "--mesh", "dp=2"], "--mesh dp=2: 'dp' is not a mesh axis"),
    (["net.py", "--mesh", "dp_shard=3", "--nproc-per-node", "4"], "mesh dp_shard=3 needs 3 ranks and there are 4"),
    (["net.py", "--callback", "emma"], "there is no callback 'emma'; did you mean ema?"),
    (["net.py", "--set", "widht=3"], "--set widht=3: Net has no argument widht; did you mean width?"),
    (["net.py", "--max-steps", "3"], "No such option '--max-steps'"),
]


@pytest.mark.parametrize(("argv", "says"), BAD, ids=[" ".join(argv) for argv, _ in BAD])
def test_refused(here: Path, capsys: pytest.CaptureFixture[str], argv: list[str], says: str) -> None:
    before = tree(here)
    assert says in refused(capsys, "plan", *argv)
    assert tree(here) == before


def test_the_user_s_own_error_is_shown(here: Path) -> None:
    with pytest.raises(KeyError, match="no such column"):
        main_module.main(["plan", "net.py", "--set", "bad=true", "--device-memory", "1GiB"])


def test_sizes() -> None:
    expected = {"80GiB": 80 << 30, "80G": 80 << 30, "80GB": 80 * 10**9, "1.5 TiB": 3 << 39, "512mib": 512 << 20}
    assert {text: parse_size(text) for text in expected} == expected
    assert parse_size("4096") == 4096
    for text in ("", "GiB", "-1GiB", "80XiB", "1i"):
        with pytest.raises(UsageError):
            parse_size(text)
