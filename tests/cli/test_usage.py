"""Bad input: one line with the remedy, exit code 2, and nothing written. In this process: no worker is started."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from elastictrain.cli import main as main_module
from elastictrain.cli import run as run_module
from elastictrain.cli.checks import Job
from elastictrain.errors import UsageError
from elastictrain.metrics.presence import Presence
from elastictrain.runfile import is_same_target

ROOT = Path(__file__).parents[2]

TASK = """
from elastictrain import Task

class Net(Task):
    def __init__(self, dim: int = 8, lr: float = 0.1):
        super().__init__()
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in list(os.environ):
        if name.startswith(("ELASTICTRAIN_", "PET_")):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(TASK)
    (tmp_path / "plain.py").write_text("print('hello')")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "run.json").write_text(json.dumps({"target": "other.py:Other"}))
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "run.json").write_text("{")
    attempt = tmp_path / "old" / "checkpoints" / "step-00000120" / "a1"
    attempt.mkdir(parents=True)
    (attempt / "COMMIT").write_text("{}")
    (tmp_path / "old" / "checkpoints" / "step-00000130" / "a1").mkdir(parents=True)
    (tmp_path / "old" / "run.json").write_text(json.dumps({"target": "net.py:Net"}))
    return tmp_path


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """The jobs that passed all checks; they are not run."""
    from elastictrain.cli import launch

    passed: list[Job] = []

    def launched(job: Job, presence: Presence, _: Any) -> int:
        passed.append(job)
        presence.refused()
        return 0

    monkeypatch.setattr(launch, "launch", launched)
    return passed


def tree(folder: Path) -> dict[str, bytes | None]:
    return {str(file.relative_to(folder)): file.read_bytes() if file.is_file() else None for file in folder.rglob("*")}


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one line that is printed."""
    with pytest.raises(SystemExit) as end:
        main_module.main(list(argv))
    printed = capsys.readouterr()
    assert end.value.code == 2, printed.err
    assert printed.out == ""
    assert printed.err.count("\n") == 1, printed.err
    assert printed.err.startswith("elastictrain: error: ")
    return printed.err.strip()


def passes(jobs: list[Job], *argv: str) -> Job:
    with pytest.raises(SystemExit) as end:
        main_module.main(["run", *argv])
    assert end.value.code == 0
    return jobs[-1]


BAD = [
    (["nte.py:Net"], "nte.py does not exist; did you mean net.py?"),
    (["nopkg.mod:Net"], "there is no module nopkg"),
    (["net.py:Nett"], "net.py has no class Nett; did you mean Net?"),
    ([], "Missing argument 'TARGET'; write elastictrain run TARGET, for instance"),
    (["net.py", "--max-step", "3"], "No such option '--max-step'. (Did you mean one of: '--max-epochs', "),
    (["net.py", "--max-steps", "many"], "Invalid value for '--max-steps': 'many' is not a valid integer"),
    (["net.py", "--max-steps", "-3"], "Invalid value for '--max-steps': -3 is not in the range x>=1"),
    (["net.py", "--max-restarts", "-1"], "-1 is not in the range x>=0"),
    (["net.py", "--grace", "0"], "not in the range x>0"),
    (["net.py", "--nnodes", "two"], "--nnodes two: write a number of nodes, or MIN:MAX such as 1:4"),
    (["net.py", "--nnodes", "4:2"], "--nnodes 4:2: write a number of nodes"),
    (["net.py", "--nnodes", "0"], "--nnodes 0: write"),
    (["net.py", "--logger", "wand"], "--logger wand: there is no logger 'wand'; did you mean wandb?"),
    (["net.py", "--logger", "csv:name"], "--logger csv:name: 'name' is not NAME=VALUE"),
    (["net.py", "--metrics-port", "70000"], "70000 is not in the range 0<=x<=65535"),
    (
        ["plain.py", "--nnodes", "2"],
        "--nnodes 2: several nodes need a place to meet, and a script's run directory is not",
    ),
    (["net.py", "--rdzv-endpoint", ":29400"], "--rdzv-endpoint :29400: write HOST:PORT"),
    (["net.py", "--rdzv-endpoint", "a:b"], "--rdzv-endpoint a:b: write HOST:PORT"),
    (["net.py", "--rdzv-backend", "etcd"], "--rdzv-backend etcd: it is elastictrain, or c10d"),
    (["net.py", "--rdzv-backend", "c10d", "--nnodes", "2"], "--rdzv-backend c10d needs --rdzv-endpoint HOST:PORT"),
    (["net.py", "--rdzv-conf", "tll=3"], "--rdzv-conf tll=3: write NAME=SECONDS, where NAME is one of join_timeout,"),
    (["net.py", "--nproc-per-node", "0"], "--nproc-per-node 0: write a number of workers, or auto"),
    (["net.py", "--nproc-per-node", "all"], "--nproc-per-node all: write"),
    (["net.py", "--set", "dmi=3"], "--set dmi=3: Net has no argument dmi; did you mean dim? it takes dim, lr"),
    (["net.py", "--set", "dim=big"], "--set dim=big: Net wants dim to be a whole number"),
    (["net.py", "--set", "dim"], "--set dim: write --set NAME=VALUE"),
    (["net.py", "--set", "dim=1", "--set", "dim=2"], "--set dim is given twice (1 and 2): keep one of them"),
    (["net.py", "stray"], "net.py:Net takes no arguments, but got stray: give them as --set k=v"),
    (["net.py", "--global-batch-size", "4", "--micro-batch-size", "8"], "--global-batch-size 4 is smaller than"),
    (["net.py", "--mesh", "dp=2"], "--mesh dp=2: 'dp' is not a mesh axis"),
    (["net.py", "--mesh", "dp_shard=2", "--nproc-per-node", "3"], "mesh dp_shard=2 needs 2 ranks and there are 3"),
    (["net.py", "--device-memory", "big"], "--device-memory big: write a size, such as 80GiB"),
    (
        ["net.py", "--device-memory", "1GiB", "--mesh", "tp=1,dp_shard=-1"],
        'is what mesh "auto" may reckon with, in bytes',
    ),
    (["net.py", "--topology", "none.yaml"], "topology none.yaml cannot be read (No such file or directory): check"),
    (["net.py", "--topology", "net.py"], "topology net.py, line 4: mapping values are not allowed here"),
    (["plain.py", "--topology", "net.py"], "and --topology cannot reach its Trainer"),
    (["net.py", "--callback", "emma"], "there is no callback 'emma'; did you mean ema?"),
    (["net.py", "--run-dir", "other"], "run directory other belongs to other.py:Other, not to net.py:Net"),
    (["net.py", "--run-dir", "damaged"], "run directory damaged: its run.json is damaged"),
    (["net.py", "--run-dir", "net.py/runs"], "run directory net.py/runs cannot be"),
    (["net.py", "--run-dir", "/proc/runs"], "run directory /proc/runs cannot be written"),
    (["net.py", "--run-dir", "s4://bucket/run"], "unknown URL scheme s4://"),
    (["net.py", "--run-dir", "az://bucket/run"], "pip install 'elastictrain[azure]'"),
    (["net.py", "--run-dir", "memory://run", "--nproc-per-node", "2"], "memory:// is inside of one process"),
    (["net.py", "--run-dir", ""], "the run directory is empty: give --run-dir a path or URL"),
    (["net.py", "--resume", ""], "--resume is empty: name a run directory or a checkpoint, or leave it out"),
    (["net.py", "--resume", "ftp://127.0.0.1:1/x"], "--resume ftp://127.0.0.1:1/x cannot be read (ConnectionRefused"),
    (["net.py", "--resume", "nowhere"], "--resume nowhere does not exist"),
    (["net.py", "--run-dir", "old", "--resume", "never"], "old already holds checkpoints, up to step 120"),
    (["net.py"], "how long to train is not known: give --max-steps or --max-epochs"),
    (["plain.py", "--run-dir", "x"], "and --run-dir cannot reach its Trainer"),
    (["plain.py", "--max-steps", "3"], "plain.py defines no Task, so it runs as a script and --max-steps cannot reach"),
    (["plain.py", "--set", "dim=3"], "and --set cannot reach its Trainer"),
    (["plain.py", "--lr", "3"], "arguments for a script go after --"),
    (["net.py", "--config", "none.yaml"], "--config none.yaml cannot be read (No such file or directory)"),
]


@pytest.mark.parametrize(("argv", "says"), BAD, ids=[" ".join(argv) for argv, _ in BAD])
def test_refused(here: Path, capsys: pytest.CaptureFixture[str], argv: list[str], says: str) -> None:
    before = tree(here)
    if argv and argv != ["net.py"] and argv[0] != "plain.py" and "--max-steps" not in argv:
        argv = [*argv, "--max-steps", "3"]
    assert says in refused(capsys, "run", *argv)
    assert tree(here) == before


@pytest.mark.parametrize("owner", ["net.py:Net", "net:Net", "package.net:Net"])
def test_a_run_that_python_started(here: Path, jobs: list[Job], owner: str) -> None:
    (here / "old" / "run.json").write_text(json.dumps({"target": owner}))
    assert passes(jobs, "net.py", "--run-dir", "old", "--max-steps", "3").run_dir == "old"


@pytest.mark.parametrize("owner", ["net.py:Other", "net:Other", "other:Net", "network:Net", "net.py"])
def test_a_run_of_another_target(here: Path, capsys: pytest.CaptureFixture[str], owner: str) -> None:
    (here / "old" / "run.json").write_text(json.dumps({"target": owner}))
    said = refused(capsys, "run", "net.py", "--run-dir", "old", "--max-steps", "3")
    assert f"run directory old belongs to {owner}, not to net.py:Net" in said


def test_names_of_targets(here: Path) -> None:
    assert not is_same_target("one.net:Net", "two.net:Net"), "modules of two packages"
    (here / "made.py").write_text("class Made: pass")
    code = "from made import Made\nfrom elastictrain.runfile import target_of\nclass Mine(Made): pass\n"
    (here / "run.py").write_text(code + "print(target_of(Made()), target_of(Mine()))")
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "run.py"], cwd=here, env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "made:Made run.py:Mine\n"


BAD_CONFIG = [
    ("max-stepz: 3", "unknown key 'max-stepz'; did you mean max-steps? Keys are option names: nnodes,"),
    ("max-steps: 3\nmax_steps: 4", "max-steps and max_steps are one option: keep one of them"),
    ("max-steps: 3\nmax-steps: 4", "line 2: max-steps is given twice: correct the YAML"),
    ("max-steps: 3.5", "Invalid value for '--max-steps': '3.5' is not a valid integer"),
    ("max-steps: yes", "Invalid value for '--max-steps': 'True' is not a valid integer"),
    ("max-steps: [3]", "max-steps holds a list: it must be one value"),
    ("max-steps: -3", "-3 is not in the range x>=1"),
    ("full-traceback: 3", "full-traceback is 3: it must be true or false"),
    ("set: dim=3", "set holds the value 'dim=3': it must be arguments, one 'name: value' a line"),
    ("set: {dim: big}", "--set dim=big: Net wants dim to be a whole number"),
    ("set: {dim: 1, dim: 2}", "line 1: dim is given twice"),
    ("callback: {ema: 3}", "callback is {'ema': 3}: it must be a list of texts"),
    ("? [a]\n: 3", "line 1: a key must be text: correct the YAML"),
    ("set: {[a]: 3}", "line 1: a key must be text"),
    ("a: [1", "c.yaml, line 1: expected ',' or ']'"),
    ("- 3", "holds a list: it must be options"),
]


@pytest.mark.parametrize(("content", "says"), BAD_CONFIG, ids=[content for content, _ in BAD_CONFIG])
def test_bad_config(here: Path, capsys: pytest.CaptureFixture[str], content: str, says: str) -> None:
    (here / "c.yaml").write_text(content)
    before = tree(here)
    assert says in refused(capsys, "run", "net.py", "--config", "c.yaml", "--max-epochs", "1")
    assert tree(here) == before


def test_config_environment_and_command_line(here: Path, jobs: list[Job], monkeypatch: pytest.MonkeyPatch) -> None:
    content = "max-steps: 10\nlog_every: 7\nmesh: {dp_shard: 2}\nnproc-per-node: 2\n"
    content += "set: {dim: 4, lr: 1e-3}\ncallback: [ema]\n"
    (here / "c.yaml").write_text(content)
    job = passes(jobs, "net.py", "--config", "c.yaml")
    assert dict(job.trainer) == {
        "max_steps": 10,
        "log_every": 7,
        "mesh": "dp_shard=2",
        "callbacks": ["ema"],
        "loggers": [],
    }
    assert job.settings == {"dim": 4, "lr": "1e-3"}
    assert job.num_workers == 2

    monkeypatch.setenv("ELASTICTRAIN_LOG_EVERY", "8")
    monkeypatch.setenv("ELASTICTRAIN_CONFIG", "c.yaml")
    monkeypatch.setenv("PET_MAX_RESTARTS", "9")
    job = passes(jobs, "net.py", "--max-steps", "20", "--set", "lr=0.5")
    assert job.trainer["max_steps"] == 20
    assert job.trainer["log_every"] == 8
    assert job.settings == {"dim": 4, "lr": "0.5"}
    assert job.max_restarts == 9


def test_torchruns_environment(here: Path, jobs: list[Job], monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"NNODES": "2:4", "NPROC_PER_NODE": "3", "RDZV_ENDPOINT": "node0", "RDZV_ID": "job7", "RDZV_BACKEND": "c10d"}
    for name, value in told.items():
        monkeypatch.setenv(f"PET_{name}", value)
    job = passes(jobs, "net.py", "--max-steps", "3")
    assert (job.min_nodes, job.max_nodes, job.num_workers, job.endpoint) == (2, 4, 3, "node0")
    assert job.rdzv_id == "job7"
    monkeypatch.setenv("ELASTICTRAIN_NNODES", "1")
    assert passes(jobs, "net.py", "--max-epochs", "1").max_nodes == 1, "our own name comes first"


def test_defaults(here: Path, jobs: list[Job]) -> None:
    before = tree(here)
    job = passes(jobs, "net.py:Net", "--max-epochs", "2")
    assert (job.run_dir, job.min_nodes, job.max_nodes, job.num_workers) == ("runs/net", 1, 1, None)
    assert (job.max_restarts, job.grace, job.trainer) == (3, 600.0, {"max_epochs": 2, "callbacks": [], "loggers": []})
    assert passes(jobs, "plain.py", "--", "--lr", "3").script_args == ["--lr", "3"]
    assert passes(jobs, "net.py", "--run-dir", "old", "--resume", "old", "--max-steps", "3").run_dir == "old"
    assert tree(here) == before, "looking leaves nothing behind"


def test_an_error_of_ours_is_one_line_and_1(here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    from elastictrain.errors import CheckpointError

    def fail(**_: Any) -> None:
        raise CheckpointError("damaged\nbadly")

    monkeypatch.setattr(run_module.run, "callback", fail)
    with pytest.raises(SystemExit) as end:
        main_module.main(["run", "net.py"])
    assert end.value.code == 1
    assert capsys.readouterr().err == "elastictrain: error: damaged badly\n"
    with pytest.raises(UsageError):
        raise UsageError("")


def test_help_is_fast_and_imports_no_torch() -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    for argv in (["--help"], ["run", "--help"], []):
        command = [sys.executable, "-X", "importtime", "-m", "elastictrain", *argv]
        best = float("inf")
        for _ in range(3):
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            best = min(best, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert "Usage: elastictrain" in done.stdout
        imported = [line.rsplit("|", 1)[1].strip().split(".")[0] for line in done.stderr.splitlines() if "|" in line]
        assert "click" in imported
        assert {"torch", "lightning", "numpy", "fsspec", "yaml"}.isdisjoint(imported)
        assert best < 0.5, "seconds of CPU: other processes of the machine don't count"


def test_a_refusal_is_fast_and_imports_no_torch(here: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-X", "importtime", "-m", "elastictrain", "run", "net.py", "--callback", "emma"]
    command += ["--max-steps", "1"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "| torch\n" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("elastictrain: error: --callback emma")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main_module.main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith("elastictrain, version ")
