"""kill -9 of a rank, of its writer, or of both at every point that a save passes: the newest good one always loads."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from elastictrain.checkpoint import CheckpointReader
from elastictrain.checkpoint.drain import POINTS
from elastictrain.errors import CheckpointError
from tests.checkpoint import interrupted
from tests.checkpoint.states import assert_equal, blank, expected, load_all, manager, whole
from tests.helpers import RankError, run_ranks

pytestmark = pytest.mark.slow

# Two parts of a shard for each of two ranks.
BIG = {name: whole(name, (5000, 1000), torch.float32) for name in ("big", "large")}
WORKER_POINTS = ("planned", "staged", "submitted")
RANK_0_ALONE = ("gathered", "commit", "committed")
WRITER_POINTS = [*POINTS, "part:1", "part:2"]  # before the second part, and after it


def save_killed(rank: int, world_size: int, url: str, flag: Path, at: int, point: str, how: str) -> str:
    if world_size > 1:
        dist.init_process_group("gloo")
    in_writer = point not in WORKER_POINTS
    command = interrupted.command(point, how, flag) if in_writer and rank == at else None
    checkpoints = manager(url, rank=rank, world_size=world_size, generation=1, writer_command=command)
    flag.touch()
    if rank == at and not in_writer:

        def reached(passed: str) -> None:
            if passed == point:
                os.kill(os.getpid(), signal.SIGKILL)

        checkpoints.saves.reached = reached  # type: ignore[method-assign]
    said = ""
    with contextlib.suppress(RuntimeError):  # the others: the connection to the dead rank is gone
        try:
            checkpoints.save(20, {**expected(seed=2), **BIG})
        except CheckpointError as error:
            said = str(error)
    checkpoints.close()
    return said


def wait_for(url: str, step: int) -> str:
    deadline = time.monotonic() + 60.0
    while time.monotonic() < deadline:
        newest = manager(url).newest()
        if newest is not None and CheckpointReader(newest).step == step:
            return newest
        time.sleep(0.2)
    raise AssertionError(f"no checkpoint of step {step}")


def check_new(newest: str) -> None:
    targets = blank({**expected(), **BIG})
    CheckpointReader(newest).load(targets)
    assert_equal(targets, {**expected(seed=2), **BIG})


CASES = [
    (storage, world_size, at, point)
    for storage, world_size, at in [("local", 1, 0), ("local", 2, 0), ("local", 2, 1), ("s3", 2, 0), ("s3", 1, 0)]
    for point in WRITER_POINTS
    if at == 0 or point not in RANK_0_ALONE
]


@pytest.fixture
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    found: str = request.getfixturevalue("s3_url") if request.param == "s3" else str(tmp_path / "run")
    return found


@pytest.mark.parametrize(("url", "world_size", "at", "point"), CASES, indirect=["url"])
def test_a_writer_that_is_killed_costs_one_save(url: str, world_size: int, at: int, point: str, tmp_path: Path) -> None:
    old = manager(url).save(10, expected())
    texts = run_ranks(save_killed, world_size, url, tmp_path / "flag", at, point, "kill", timeout=120)
    newest = manager(url).newest()
    assert newest is not None
    # Killed when all was done but the saying; or when its part was, and rank 0 may have been faster than the news.
    is_new = point == "committed" or (at == 1 and point == "manifest" and "step-00000020" in newest)
    if is_new:
        check_new(newest)
    else:
        assert newest == old.path
        load_all(newest)
    assert len(set(texts)) == 1
    if not is_new or texts[0]:
        assert f"rank {at}: WriterDied: the writer process was killed by signal 9" in texts[0]
    again = manager(url, generation=2).save(20, expected(seed=3))  # the same step again, in a folder of its own
    assert manager(url).newest() == again.path
    load_all(again.path, seed=3)


@pytest.mark.parametrize(("url", "world_size", "at", "point"), CASES, indirect=["url"])
def test_a_worker_that_is_killed_does_not_keep_its_writer_from_the_commit(
    url: str, world_size: int, at: int, point: str, tmp_path: Path
) -> None:
    manager(url).save(10, expected())
    with pytest.raises(RankError, match=f"rank {at} of {world_size}: died without a word, exit code -9"):
        run_ranks(save_killed, world_size, url, tmp_path / "flag", at, point, "kill-parent", timeout=120)
    check_new(wait_for(url, 20))


@pytest.mark.parametrize(
    ("url", "world_size", "at", "point"),
    [
        (storage, world_size, at, point)
        for storage, world_size, at in [("local", 1, 0), ("local", 2, 0), ("local", 2, 1), ("s3", 2, 1)]
        for point in WORKER_POINTS
    ],
    indirect=["url"],
)
def test_a_worker_that_is_killed_before_it_has_handed_over_costs_one_save(
    url: str, world_size: int, at: int, point: str, tmp_path: Path
) -> None:
    old = manager(url).save(10, expected())
    with pytest.raises(RankError, match=f"rank {at} of {world_size}: died without a word, exit code -9"):
        run_ranks(save_killed, world_size, url, tmp_path / "flag", at, point, "kill", timeout=120)
    if point == "submitted":
        check_new(wait_for(url, 20))
    else:
        newest = manager(url).newest()
        assert newest == old.path
        load_all(newest)
    again = manager(url, generation=2).save(30, expected(seed=3))
    assert manager(url).newest() == again.path
