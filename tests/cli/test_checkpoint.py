"""``elastictrain checkpoint``: list, verify, export and prune, as commands of their own."""

from __future__ import annotations

import functools
import gc
import json
import os
import re
import resource
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from elastictrain.checkpoint import CheckpointReader, export, resolve, retention
from elastictrain.checkpoint.blocks import Blocks
from elastictrain.cli.main import main
from elastictrain.errors import UsageError
from elastictrain.rundir import RunDir
from tests.checkpoint.states import assert_equal, blank, expected, manager, spread
from tests.helpers import elastictrain_command, run_ranks


def _save(rank: int, world_size: int, url: str) -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    checkpoints = manager(url, rank=rank, world_size=world_size, keep_last=None)
    for step in (1, 2):
        state = {**spread(expected(seed=step), mesh, [Shard(0)])}
        checkpoints.save(step, state, about={"mesh": "dp_shard=2"})
    checkpoints.close()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("run")
    run_ranks(_save, 2, str(run_dir), timeout=120)
    return run_dir


@pytest.fixture
def run_dir(saved: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    import shutil

    shutil.copytree(saved, tmp_path / "run")
    return tmp_path / "run"


def command(*arguments: str | os.PathLike[str]) -> int:
    with pytest.raises(SystemExit) as end:
        main(["checkpoint", *map(os.fspath, arguments)])
    assert isinstance(end.value.code, int)
    return end.value.code


def test_a_process_of_its_own_lists_them(run_dir: Path) -> None:
    (run_dir / "checkpoints" / "step-00000003" / "000000-x").mkdir(parents=True)
    next((run_dir / "checkpoints" / "step-00000001").glob("*/shard-00001*")).unlink()
    lines = elastictrain_command("checkpoint", "list", run_dir).stdout.splitlines()
    assert lines[0].split() == ["STEP", "AGE", "SIZE", "RANKS", "LAYOUT", "STATE", "WHERE"]
    assert lines[1].split()[:6] == ["3", "-", "-", "-", "-", "not"]
    row = r"2 +\d+ (s|min) +\d+\.\d kB +2 +dp_shard=2 +whole +checkpoints/step-00000002/000000-[0-9a-f]{12}"
    assert re.fullmatch(row, lines[2]), lines[2]
    assert lines[3].split()[0] == "1" and "dp_shard=2  damaged" in lines[3]
    assert len(lines) == 4


def test_verify_names_what_is_damaged(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("verify", run_dir) == 0
    good = re.fullmatch(r"step 2: good, \d+\.\d kB at \d+\.\d\d GB/s\nstep 1: good, .* GB/s\n", capsys.readouterr().out)
    assert good is not None
    shard = next((run_dir / "checkpoints" / "step-00000002").glob("*/shard-00001*"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    assert command("verify", run_dir) == 1
    out = capsys.readouterr().out
    named = rf"step 2: DAMAGED: {shard.name} bytes 0 to {len(data)} \(model\.\S+ and \d+ more\) is not what was written"
    assert re.search(named, out) and "step 1: good" in out
    assert command("verify", run_dir, "--step", "1") == 0
    assert command("verify", run_dir, "--step", "7") == 2
    assert "holds no committed checkpoint of step 7" in capsys.readouterr().err
    assert not (run_dir / "checkpoints" / "reading").exists() or not list(
        (run_dir / "checkpoints" / "reading").iterdir()
    )


def test_verify_compares_with_several_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first thread waits until there is another."""
    path = manager(str(tmp_path)).save(1, {f"model.{number}": torch.zeros(2 << 20) for number in range(4)}).path
    threads, two, damage = set[int](), threading.Event(), Blocks.damage

    def wait(*args: Any) -> Any:
        threads.add(threading.get_ident())
        if len(threads) > 1:
            two.set()
        assert two.wait(60.0), "one thread reads all"
        return damage(*args)

    monkeypatch.setattr("elastictrain.checkpoint.threads.usable_cores", lambda: 2)
    monkeypatch.setattr(Blocks, "damage", wait)
    assert export.verify(CheckpointReader(path)) == []


def read_safetensors(folder: Path) -> dict[str, Tensor]:
    places = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    found = {}
    for name, file in places.items():
        with safe_open(str(folder / file), framework="pt") as opened:
            found[name] = opened.get_tensor(name)
    return found


def test_export_of_a_sharded_run_in_every_format(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(export, "FILE_BYTES", 500)
    want = {name.removeprefix("model."): one for name, one in expected(seed=2).items() if name.startswith("model.")}
    assert command("export", run_dir, "-o", tmp_path / "st") == 0
    assert_equal(read_safetensors(tmp_path / "st"), want)
    assert len(list((tmp_path / "st").glob("*.safetensors"))) > 1
    assert command("export", run_dir, "--to", "torch", "-o", tmp_path / "pt") == 0
    assert_equal(torch.load(tmp_path / "pt" / "state.pt", weights_only=True), want)
    assert command("export", run_dir, "--to", "dcp", "--prefix", "", "--step", "1", "-o", tmp_path / "dcp") == 0
    targets = blank(expected())
    dcp.load(targets, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    assert_equal(targets, expected(seed=1))
    assert not list((tmp_path / "dcp").glob(".staging*"))
    capsys.readouterr()
    assert command("export", run_dir, "-o", tmp_path / "st") == 2
    assert command("export", run_dir, "--prefix", "ema.", "-o", tmp_path / "ema") == 2
    assert command("export", run_dir, "--to", "hf", "-o", tmp_path / "ema") == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 3 and "--to hf is for a run whose task holds a model of transformers, and" in err
    assert "is there already: choose a new folder" in err
    assert "no tensor's name begins with 'ema.'; they begin with model., optim." in err
    assert not (tmp_path / "ema").exists()


@pytest.mark.parametrize("to", ["safetensors", "hf"])
def test_an_export_holds_one_tensor_at_a_time(to: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    about = {"transformers": {"prefix": "net.", "config": {"model_type": "none"}, "generation": None}}
    state = {f"model.net.{number}": torch.full((12_345,), float(number)) for number in range(5)}
    run = manager(str(tmp_path / "run")).save(1, state, about=about).path
    num_held, load = [], export._load
    del state

    def count(*args: object) -> Tensor:
        one = load(*args)  # type: ignore[arg-type]
        held = [found for found in gc.get_objects() if type(found) is Tensor and found.shape == one.shape]
        num_held.append(len({found.untyped_storage().data_ptr() for found in held}))
        return one

    monkeypatch.setattr(export, "_load", count)
    gc.collect()
    export.export(CheckpointReader(run), tmp_path / "out", to=to, only="model.")
    assert num_held == [1] * 5
    assert (tmp_path / "out" / "config.json").exists() == (to == "hf")


@pytest.mark.slow
def test_an_export_needs_memory_for_its_largest_tensor_and_not_for_all(tmp_path: Path) -> None:
    """Of what the kernel must keep for a process: mapped files are not."""
    size, count = 8 << 20, 12

    def run(rank: int, world_size: int) -> None:
        threading.stack_size(256 << 10)
        state = {f"model.net.{number}": torch.full((size // 4,), float(number)) for number in range(count)}
        about = {"transformers": {"prefix": "net.", "config": {"model_type": "none"}, "generation": None}}
        reader = CheckpointReader(manager(str(tmp_path / "run")).save(1, state, about=about).path)
        del state
        for to in export.FORMATS:
            status = Path("/proc/self/status").read_text()
            has = int(re.search(r"VmData:\s+(\d+)", status)[1]) << 10  # type: ignore[index]
            resource.setrlimit(resource.RLIMIT_DATA, (has + 4 * size, resource.RLIM_INFINITY))
            export.export(reader, tmp_path / to, to=to, only="model.")
            written = sum(file.stat().st_size for file in (tmp_path / to).iterdir())
            assert size * count < written < size * count + (1 << 20), to

    run_ranks(run, 1)


def test_an_export_of_what_is_damaged_leaves_nothing(run_dir: Path, tmp_path: Path) -> None:
    shard = next((run_dir / "checkpoints" / "step-00000002").glob("*/shard-00001*"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    assert command("export", run_dir, "-o", tmp_path / "st") in (1, 2)
    assert not (tmp_path / "st").exists()


def test_prune(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    abandoned = run_dir / "checkpoints" / "step-00000003" / "000000-x"
    abandoned.mkdir(parents=True)
    os.utime(abandoned, (time.time() - 7200,) * 2)
    there = sorted(run_dir.rglob("*"))
    assert command("prune", run_dir, "--keep-last", "1", "--dry-run") == 0
    out = capsys.readouterr().out
    assert "would delete checkpoints/step-00000001/" in out and "checkpoints/step-00000003/000000-x (abandoned" in out
    assert sorted(run_dir.rglob("*")) == there, "nothing has changed"
    assert command("prune", run_dir, "--keep-last", "1") == 0
    assert [path.name for path in (run_dir / "checkpoints").glob("step-*")] == ["step-00000002"]
    assert CheckpointReader(resolve(str(run_dir))).step == 2


def test_prune_tells_of_uploads_that_nobody_finished(
    s3_url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "abandoned_uploads", functools.partial(retention.abandoned_uploads, grace=-60.0))
    run_dir = RunDir(s3_url)
    bucket, key, _ = run_dir.fs.split_path(run_dir.join("checkpoints", "step-00000001", "000000-dead", "shard"))
    run_dir.fs.call_s3("create_multipart_upload", Bucket=bucket, Key=key)
    for option in (["--dry-run"], []):
        assert len(run_dir.fs.list_multipart_uploads(bucket)) == 1
        assert command("prune", s3_url, *option) == 0
    out = capsys.readouterr().out
    assert (
        out
        == f"would abort the upload of {bucket}/{key} (abandoned)\naborting the upload of {bucket}/{key} (abandoned)\n"
    )


def test_what_is_no_run_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["list"], ["verify"], ["export", "-o", str(tmp_path / "x")]):
        assert command(*arguments[:1], tmp_path, *arguments[1:]) == 2
    assert command("list") == 2
    err = capsys.readouterr().err
    assert "holds no checkpoints: give the run's directory" in err and "Missing argument 'RUN_DIR'" in err
    with pytest.raises(UsageError, match="--to zip is unknown"):
        export.export(None, tmp_path / "x", to="zip")  # type: ignore[arg-type]
