"""The promise of slots: fp32 loss per step is the same on any number of ranks, dropout on, whatever happens between."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers import logged, run_ranks
from tests.trainer.tasks import NUM_SAMPLES, Recorded, Streamed, farthest, merged, train, write_files

STEPS = 40
TOLERANCE = 1e-6

pytestmark = pytest.mark.filterwarnings("ignore")


def _map(rank: int, world_size: int, run_dir: Path, mesh: str, steps: int, workers: int) -> Any:
    return train(Recorded(num_workers=workers), run_dir, mesh, steps)


def _stream(rank: int, world_size: int, run_dir: Path, mesh: str, steps: int, workers: int, files: Path) -> Any:
    return train(Streamed(files, num_workers=workers), run_dir, mesh, steps)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One rank: loss by step, validation by step, what each microbatch held."""
    run_dir = tmp_path_factory.mktemp("one")
    seen = merged(run_ranks(_map, 1, run_dir, "auto", STEPS, 0))
    return logged(run_dir, "train/loss"), logged(run_dir, "val/loss"), seen


@pytest.fixture(scope="module")
def streamed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    files, run_dir = tmp_path_factory.mktemp("files"), tmp_path_factory.mktemp("one")
    write_files(files)
    seen = merged(run_ranks(_stream, 1, run_dir, "auto", STEPS, 0, files))
    return logged(run_dir, "train/loss"), seen, files


def test_the_reference_uses_every_sample_once_an_epoch(reference: Any) -> None:
    losses, validations, seen = reference
    assert sorted(losses) == list(range(1, STEPS + 1))
    assert sorted(validations) == [0, 20, 40]
    for epoch in range(8):
        used = [i for (e, _), indices in seen.items() if e == epoch for i in indices]
        assert sorted(used) == list(range(NUM_SAMPLES)), epoch
    assert len({tuple(i for (e, _), s in sorted(seen.items()) if e == epoch for i in s) for epoch in range(8)}) == 8


@pytest.mark.parametrize(
    ("world_size", "mesh", "workers"),
    [
        (2, "dp_replicate=2", 0),
        pytest.param(2, "dp_shard=2", 2, marks=pytest.mark.slow),
        pytest.param(2, "dp_replicate=2", 2, marks=pytest.mark.slow),
        pytest.param(2, "dp_shard=2", 0, marks=pytest.mark.slow),
        pytest.param(3, "dp_replicate=3", 0, marks=pytest.mark.slow),
        pytest.param(3, "dp_shard=3", 0, marks=pytest.mark.slow),
        pytest.param(4, "dp_replicate=4", 0, marks=pytest.mark.slow),
        pytest.param(4, "dp_shard=4", 0, marks=pytest.mark.slow),
        pytest.param(4, "dp_replicate=2,dp_shard=2", 0, marks=pytest.mark.slow),
        pytest.param(5, "dp_replicate=5", 2, marks=pytest.mark.slow),
        pytest.param(5, "dp_shard=5", 0, marks=pytest.mark.slow),
    ],
)
def test_same_curve(world_size: int, mesh: str, workers: int, reference: Any, tmp_path: Path) -> None:
    losses, validations, seen = reference
    assert merged(run_ranks(_map, world_size, tmp_path, mesh, STEPS, workers, timeout=150)) == seen
    assert farthest(logged(tmp_path, "train/loss"), losses) <= TOLERANCE
    assert farthest(logged(tmp_path, "val/loss"), validations) <= TOLERANCE


@pytest.mark.parametrize(
    ("world_size", "mesh", "workers"),
    [
        (3, "dp_replicate=3", 2),
        pytest.param(2, "dp_shard=2", 0, marks=pytest.mark.slow),
        pytest.param(4, "dp_replicate=2,dp_shard=2", 0, marks=pytest.mark.slow),
        pytest.param(5, "dp_replicate=5", 0, marks=pytest.mark.slow),
        pytest.param(5, "dp_shard=5", 2, marks=pytest.mark.slow),
    ],
)
def test_same_curve_of_a_stream(world_size: int, mesh: str, workers: int, streamed: Any, tmp_path: Path) -> None:
    losses, seen, files = streamed
    assert merged(run_ranks(_stream, world_size, tmp_path, mesh, STEPS, workers, files, timeout=150)) == seen
    assert farthest(logged(tmp_path, "train/loss"), losses) <= TOLERANCE


# Each chain stops in the middle of an epoch (5 steps each) and goes on elsewhere.
@pytest.mark.parametrize(
    "chain",
    [
        [(2, "dp_shard=2", 7, 0), (3, "dp_replicate=3", 18, 2)],
        pytest.param(
            [(4, "dp_shard=4", 8, 2), (1, "auto", 14, 0), (5, "dp_replicate=5", 27, 0), (3, "dp_shard=3", 40, 0)],
            marks=pytest.mark.slow,
        ),
        pytest.param([(1, "auto", 11, 2), (4, "dp_replicate=2,dp_shard=2", 33, 0)], marks=pytest.mark.slow),
    ],
)
def test_resume_elsewhere(chain: list[Any], reference: Any, tmp_path: Path) -> None:
    losses, _, seen = reference
    parts = []
    for world_size, mesh, steps, workers in chain:
        parts += run_ranks(_map, world_size, tmp_path, mesh, steps, workers, timeout=150)
    last = chain[-1][2]
    curve = logged(tmp_path, "train/loss")  # fails where a step was done twice
    assert farthest(curve, {step: loss for step, loss in losses.items() if step <= last}) <= TOLERANCE
    together = merged(parts)
    assert together == {key: seen[key] for key in together}
    assert len(together) == (last // 5) * 34 + (last % 5) * 8  # an epoch is 4 steps of 8 slots and one of 2


@pytest.mark.slow
def test_resume_a_stream_elsewhere(streamed: Any, tmp_path: Path) -> None:
    losses, seen, files = streamed
    parts = []
    for world_size, mesh, steps, workers in ((2, "dp_replicate=2", 7, 2), (3, "dp_shard=3", 20, 0), (1, "auto", 27, 2)):
        parts += run_ranks(_stream, world_size, tmp_path, mesh, steps, workers, files, timeout=150)
    assert farthest(logged(tmp_path, "train/loss"), {s: v for s, v in losses.items() if s <= 27}) <= TOLERANCE
    together = merged(parts)
    assert together == {key: seen[key] for key in together}
    assert len(together) == 27 * 8
