"""kill -9 of the agent at points of a save and of a snapshot: the newest good one always loads, nothing good is lost, what
is left is swept, and no process stays.

A few points on each kind of storage; ``ELASTICTRAIN_CRASHES=all`` takes all of them, which is some minutes. The same of a
rank, its writer or both: test_crashes.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.checkpoint.test_crashes import RANK_0_ALONE, WORKER_POINTS, WRITER_POINTS
from tests.checkpoint.walk import Stop, walk
from tests.helpers import run_ranks

IS_ALL = os.environ.get("ELASTICTRAIN_CRASHES") == "all"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800 if IS_ALL else 180)]

FEW = [
    (
        "local",
        2,
        [
            Stop("writer", "part:1", 1, alone=False),  # no checkpoint is there yet
            Stop("writer", "part:1", 1),
            Stop("worker", "staged", 1),
            Stop("writer", "commit", alone=False),
        ],
    ),
    ("s3", 1, [Stop("writer", "gathered"), Stop("writer", "part:2", alone=False)]),
    ("local", 1, [Stop("keeper", "hash"), Stop("worker", "given")]),
]


def all_of(num_workers: int, rank: int, alone: bool) -> list[Stop]:
    """Of a save."""
    writer = [point for point in WRITER_POINTS if not rank or point not in RANK_0_ALONE]
    stops = [Stop("writer", point, rank, alone) for point in writer]
    return [*stops, *(Stop("worker", point, rank, alone) for point in WORKER_POINTS)]


ALL = [
    (storage, num_workers, all_of(num_workers, rank, alone))
    for storage in ("local", "s3")
    for num_workers in (1, 2)
    for rank in range(num_workers)
    for alone in (True, False)
]
ALL += [
    (
        "local",
        num_workers,
        [
            Stop(where, point, num_workers - 1, alone)
            for where, point in [("keeper", "hash"), ("worker", "room"), ("worker", "staged"), ("worker", "given")]
            for alone in (True, False)
        ],
    )
    for num_workers in (1, 2)
]


@pytest.mark.parametrize(
    ("storage", "num_workers", "stops"),
    ALL if IS_ALL else FEW,
    ids=lambda value: "-".join(dict.fromkeys(one.where for one in value)) if isinstance(value, list) else None,
)
def test_an_agent_that_is_killed_costs_what_was_not_handed_over(
    storage: str, num_workers: int, stops: list[Stop], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    url: str = request.getfixturevalue("s3_url") if storage == "s3" else str(tmp_path / "run")
    run_ranks(walk, 1, url, tmp_path / "walk", num_workers, stops, timeout=1750 if IS_ALL else 170)
