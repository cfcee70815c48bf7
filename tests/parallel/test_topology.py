"""Tensor parallelism on neighbours, and a word where it cannot be."""

from __future__ import annotations

import re

import pytest

from elastictrain.config import MeshShape
from elastictrain.parallel.topology import crosses_nodes, members, placement, warning


def test_tp_has_neighbours_and_pp_the_farthest() -> None:
    shape = MeshShape(pp=2, dp_replicate=2, dp_shard=2, tp=4)
    assert members(shape, "tp") == [0, 1, 2, 3]
    assert members(shape, "tp", 6) == [4, 5, 6, 7]
    assert members(shape, "dp_shard", 5) == [1, 5]
    assert members(shape, "dp_replicate") == [0, 8]
    assert members(shape, "pp", 31) == [15, 31]
    assert not crosses_nodes(shape, "tp", 8) and not crosses_nodes(shape, "dp_shard", 8)
    assert crosses_nodes(shape, "dp_replicate", 8) and crosses_nodes(shape, "pp", 8)


@pytest.mark.parametrize(
    ("shape", "local", "expected"),
    [
        (MeshShape(), 1, None),
        (MeshShape(tp=4), 4, None),
        (MeshShape(dp_shard=2, tp=2), 4, "tp (ranks 0, 1, …), dp_shard (ranks 0, 2, …)"),
        (MeshShape(dp_replicate=8), 4, "dp_replicate (across nodes: ranks 0, 1, … 7)"),
        (
            MeshShape(dp_shard=4, tp=2),
            2,
            "tp (in a node: ranks 0, 1, …), dp_shard (across nodes: ranks 0, 2, 4, 6, …)",
        ),
    ],
    ids=str,
)
def test_the_placement_is_told(shape: MeshShape, local: int, expected: str | None) -> None:
    assert placement(shape, local) == expected


@pytest.mark.parametrize(
    ("shape", "local", "expected"),
    [
        (MeshShape(dp_shard=2, tp=2), 2, None),
        (MeshShape(dp_shard=16), 2, None),
        (MeshShape(tp=4), 2, "tp=4 spans nodes of 2 ranks: .* tp=2 would stay within a node"),
        (MeshShape(dp_shard=3, tp=2), 3, "tp=2 spans nodes of 3 ranks: .* dp_shard would stay within a node"),
    ],
    ids=str,
)
def test_tp_over_nodes_is_warned_about(shape: MeshShape, local: int, expected: str | None) -> None:
    told = warning(shape, local)
    assert told is None if expected is None else re.fullmatch(expected, told or "")
