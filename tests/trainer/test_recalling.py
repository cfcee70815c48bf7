"""What a start may go on from, the same on all ranks."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from elastictrain.checkpoint.held import About
from elastictrain.checkpoint.ranks import Ranks
from elastictrain.errors import CheckpointError
from elastictrain.parallel import mesh
from elastictrain.recalling import Recalling, is_past
from elastictrain.resuming import Resumption
from elastictrain.rundir import RunDir
from tests.checkpoint.states import manager
from tests.helpers import run_ranks


@pytest.mark.parametrize(
    ("starts", "is_good"),
    [
        ({}, True),
        ({4: 90}, True),  # a later start that went on from there, or from later: this step is in its past
        ({4: 95}, True),
        ({4: 80}, False),  # it has trained steps 81 to 90 again, on its own
        ({4: 90, 5: 0}, False),
        ({3: 0, 2: 80}, True),  # its own start, and those before
    ],
    ids=str,
)
def test_steps_that_a_later_start_has_trained_again_are_not_the_past(starts: dict[int, int], is_good: bool) -> None:
    snapshot = About("snapshot", 90, 3, "run", "job", 0, 1, 100, {})
    assert is_past(snapshot, run="run", job=None, starts=starts) == is_good
    assert is_past(snapshot, run="run", job="job", starts=starts) == is_good
    assert not is_past(snapshot, run="another run", job=None, starts=starts)
    assert not is_past(snapshot, run="run", job="another job, with --resume never", starts=starts)


def test_storage_that_does_not_answer_throws_no_snapshot_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it is the run's past cannot be read: another start may be luckier, and this one must not go on without it."""
    about = About("snapshot", 90, 3, "run", "job", 0, 1, 100, {})
    settings = SimpleNamespace(resume="auto")
    membership = SimpleNamespace(local_rank=0, job_id="job")
    session: Any = SimpleNamespace(
        membership=membership, settings=settings, run_dir=RunDir(tmp_path), ranks=SimpleNamespace(rank=0, world_size=1)
    )
    recalling = Recalling(session, [], ask_main=lambda question: question())
    monkeypatch.setattr(
        recalling._memory,
        "meet",
        lambda key, fits, **more: Ranks(0, 1).round(lambda: None, lambda parts: fits([about])),
    )

    def names(folder: str) -> list[str]:
        raise TimeoutError("slow down")

    monkeypatch.setattr(session.run_dir, "names", names)
    with pytest.raises(CheckpointError, match=r"run directory .* cannot be used \(TimeoutError: slow down\)"):
        recalling._meet({"id": "run"})


def test_all_ranks_take_the_newest_checkpoint_that_rank_0_sees(tmp_path: Path) -> None:
    """And what each of them has to say comes with it."""
    path = manager(str(tmp_path / "node0")).save(1, {"w": torch.arange(100.0)}).path

    def look(rank: int, world_size: int) -> tuple[str | None, str | None, list[int]]:
        dist.init_process_group("gloo")
        ranks = mesh.Ranks(rank, world_size, rank, torch.device("cpu"), None, owns_group=False)
        resumption = Resumption(SimpleNamespace(ranks=ranks))  # type: ignore[arg-type]
        newest = manager(str(tmp_path / f"node{rank}"), rank=rank, world_size=world_size).newest
        return resumption.ask_main(newest), *resumption.ask_main_and_tell(newest, rank)

    assert run_ranks(look, 2) == [(path, path, [0, 1])] * 2
