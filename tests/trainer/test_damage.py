"""A run goes on from the newest checkpoint that is good, and says what it passed over; what fails on one rank ends all.
A save that fails is said, and is tried again.
"""

from __future__ import annotations

import errno
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elastictrain import CheckpointConfig, Trainer, resuming
from elastictrain.checkpoint import CheckpointManager, CheckpointReader, resolve, saves
from elastictrain.errors import CheckpointError
from tests.checkpoint import interrupted
from tests.checkpoint.nodes import wait_until
from tests.helpers import run_ranks
from tests.trainer.tasks import Recorded

pytestmark = pytest.mark.filterwarnings("ignore")

CONFIG = CheckpointConfig(every_steps=3, every_seconds=None, keep_last=None)


def _fit(run_dir: Path, steps: int, *, task: Recorded | None = None, **options: Any) -> None:
    options = {"global_batch_size": 24, "log_every": 1, "checkpoint": CONFIG, **options}
    Trainer(run_dir=str(run_dir), max_steps=steps, **options).fit(task or Recorded())


def _flip(checkpoints: Path, step: int, tensor: str) -> None:
    """One bit of a tensor."""
    folder = Path(resolve(str(checkpoints / f"step-{step:08d}")))
    for rank, manifest in enumerate(CheckpointReader(folder).manifests):
        if places := [one.end for one in manifest.pieces if one.name == tensor]:
            shard = folder / f"shard-{rank:05d}-of-{manifest.world_size:05d}.safetensors"
            data = bytearray(shard.read_bytes())
            data[places[0] - 1] ^= 4
            shard.write_bytes(data)


@pytest.mark.parametrize("tensor", ["model.first.weight", "optim.0.first.weight.exp_avg"])
def test_a_damaged_checkpoint_is_passed_over_and_said(
    tensor: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _fit(tmp_path, 6)
    _flip(tmp_path / "checkpoints", 6, tensor)
    _fit(tmp_path, 8)
    assert CheckpointReader(resolve(str(tmp_path))).step == 8
    text = " ".join(capsys.readouterr().out.split())
    assert "is damaged: shard-00000-of-00001.safetensors bytes" in text and "going on from the older" in text
    shutil.rmtree(tmp_path / "checkpoints" / "step-00000006")  # the damaged one, and a good one of the second start
    _flip(tmp_path / "checkpoints", 3, tensor)
    _flip(tmp_path / "checkpoints", 8, tensor)
    with pytest.raises(CheckpointError, match=r"is damaged.*there is no other checkpoint in"):
        _fit(tmp_path, 9)


def test_a_save_that_fails_is_said_at_the_next_step_and_the_next_interval_tries_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The writer of the first save has an error of its storage. Training goes on, unless it shall not."""
    managers: list[CheckpointManager] = []
    is_said: dict[int, bool] = {}  # by the number of finished steps

    def make(*args: Any, **options: Any) -> CheckpointManager:
        managers.append(CheckpointManager(*args, **options))
        return managers[-1]

    class Watched(Recorded):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            is_said[self.global_step] = "no checkpoint of step 3 was written to" in caplog.text
            if self.global_step == 3:

                def knows() -> bool:
                    managers[-1].look()
                    return managers[-1].has_news

                wait_until(knows)

    flag = tmp_path / "flag"
    flag.touch()
    monkeypatch.setattr(saves, "COMMAND", interrupted.command("manifest", str(errno.EIO), flag))
    monkeypatch.setattr(resuming, "CheckpointManager", make)
    _fit(tmp_path / "run", 8, task=Watched())
    assert is_said == {step: step > 3 for step in range(8)}
    assert "Input/output error" in caplog.text and "training goes on, 1 failed so far" in caplog.text
    assert sorted(os.listdir(tmp_path / "run" / "checkpoints")) == ["step-00000006", "step-00000008"]
    is_said.clear()
    raises = replace(CONFIG, on_failure="raise")
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 3 .* Input/output error"):
        _fit(tmp_path / "raises", 8, task=Watched(), checkpoint=raises)
    assert max(is_said) == 3, "at the next step"


def _fit_ranks(rank: int, world_size: int, run_dir: Path, steps: int) -> int:
    task = Recorded()
    Trainer(run_dir=str(run_dir), max_steps=steps, global_batch_size=24, mesh="dp_shard=2", checkpoint=CONFIG).fit(task)
    return len(task.seen)


def _fit_failing(rank: int, world_size: int, run_dir: Path) -> list[str]:
    """What each of three starts raises on this rank; something else fails in each."""
    raised = []
    for at, owner, name, error in [
        (0, resuming.runfile, "check", KeyError("a bug")),
        (0, resuming, "Recorder", MemoryError("no memory")),
        (1, os, "preadv", OSError(errno.EIO, os.strerror(errno.EIO))),
    ]:

        def fail(*args: Any, error: Exception = error, **options: Any) -> Any:
            raise error

        with pytest.MonkeyPatch.context() as patch, pytest.raises(Exception) as failed:
            if rank == at:
                patch.setattr(owner, name, fail)
            _fit_ranks(rank, world_size, run_dir, 8)
        raised.append(f"{type(failed.value).__name__}: {failed.value}")
    _fit_ranks(rank, world_size, run_dir, 8)
    return raised


@pytest.mark.slow
def test_what_one_rank_cannot_do_none_does(tmp_path: Path) -> None:
    """Reading run.json, writing it, and reading a checkpoint, whose damage moves all ranks to the next older one."""
    run_ranks(_fit_ranks, 2, tmp_path, 6)
    there = set(tmp_path.rglob("*.safetensors"))
    (bug, memory, main), (told_bug, told_memory, told) = run_ranks(_fit_failing, 2, tmp_path, timeout=120)
    assert bug == "KeyError: 'a bug'" and told_bug == f"ElasticTrainError: rank 0 could not go on: {bug}"
    assert memory == "MemoryError: no memory" and told_memory.endswith(f"rank 0 could not go on: {memory}")
    assert main == told and main.startswith("CheckpointError: checkpoint /") and "\n" not in main
    assert "cannot be read (OSError: [Errno 5] Input/output error): check that its storage can be reached" in main
    assert there < set(tmp_path.rglob("*.safetensors")), "nothing is lost, and the next start goes on"
    shard = Path(resolve(str(tmp_path))) / "shard-00001-of-00002.safetensors"  # rank 1's part of the weights
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    assert run_ranks(_fit_ranks, 2, tmp_path, 9) != [0, 0]
    assert CheckpointReader(resolve(str(tmp_path))).step == 9
