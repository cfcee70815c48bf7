"""Each rank's own times, and those of the ranks of a mesh axis, as runs of their own beside the run's in TensorBoard.

``tensorboard/rank-00003`` has what rank 3 was busy with; with more than one mesh axis ``tensorboard/dp_shard-1`` has the
mean over the ranks whose place on ``dp_shard`` is 1. TensorBoard draws them in one chart, so that a slow rank, or a slow
group of them, is seen. On object stores these are written rarely, since each is an object of its own.

On failure: training goes on; see :mod:`elastictrain.metrics.courier`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from elastictrain.config import AXES, MeshShape
from elastictrain.metrics.courier import Courier, Writer, interval
from elastictrain.metrics.record import Record
from elastictrain.metrics.tensorboard import EventFiles
from elastictrain.rundir import RunDir

NAMES = ("rank/busy", "rank/data")  # seconds of a mean step: not waiting for other ranks; waiting for data
MOST = 64  # ranks that have a run each; with more of them only the axes have

_RARELY = 1800.0  # seconds between two flushes on object stores, later


class RankTimes(NamedTuple):
    """Of all ranks, at ``step`` finished steps."""

    step: int
    samples: int
    time: float
    epoch: int
    means: npt.NDArray[np.float32]  # (2, ranks): what NAMES says


class RankViews(Courier[RankTimes]):
    """Takes the times of all ranks from one thread of rank 0.

    Args:
        shape: the mesh that the ranks form, numbered with its last axis fastest.
    """

    def __init__(self, run_dir: RunDir, *, generation: int, start_step: int, shape: MeshShape) -> None:
        writers: list[Writer[RankTimes]] = [
            _View(run_dir, name, ranks, generation=generation, start_step=start_step)
            for name, ranks in views_of(shape).items()
        ]
        pace = interval if run_dir.is_local else _rarely
        super().__init__(run_dir, writers, what="times of ranks", max_items=5_000, pace=pace)


def views_of(shape: MeshShape) -> dict[str, list[int]]:
    """The runs that there are, and the ranks of each."""
    views: dict[str, list[int]] = {}
    if 1 < shape.world_size <= MOST:
        views |= {f"rank-{rank:05d}": [rank] for rank in range(shape.world_size)}
    axes = [axis for axis, size in zip(AXES, shape.sizes, strict=True) if size > 1]
    if len(axes) > 1 or shape.world_size > MOST:
        for axis in axes:
            views |= dict(_along(shape, axis))
    return views


def _along(shape: MeshShape, axis: str) -> Iterator[tuple[str, list[int]]]:
    places = list(itertools.product(*map(range, shape.sizes)))
    for place in range(min(getattr(shape, axis), MOST)):
        yield f"{axis}-{place}", [rank for rank, at in enumerate(places) if at[AXES.index(axis)] == place]


def _rarely(age: float) -> float:
    return min(max(60.0, age / 2), _RARELY)


class _View:
    """One run: the mean over some ranks."""

    what = "times of ranks"

    def __init__(self, run_dir: RunDir, name: str, ranks: list[int], *, generation: int, start_step: int) -> None:
        self._ranks = ranks
        self._events = EventFiles(run_dir, generation=generation, start_step=start_step, run=name)

    def write(self, items: Sequence[RankTimes]) -> None:
        self._events.write([self._mean(item) for item in items])

    def _mean(self, item: RankTimes) -> Record:
        means = item.means[:, self._ranks].mean(axis=1)
        values = dict(zip(NAMES, means.tolist(), strict=True))
        return (item.step, item.samples, item.time, item.epoch, values)
