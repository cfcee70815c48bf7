"""Which ranks of a mesh are neighbours: what is near runs what talks most.

Ranks are numbered node by node, and the axes of the mesh from the outermost to the innermost
(:data:`~elastictrain.config.AXES`). So ``tp``, which sends activations in every layer, has consecutive ranks and stays
within a node wherever it divides the ranks of a node; ``dp_shard`` comes next, ``dp_replicate`` and ``pp``, which send
least, are the first to cross nodes. A topology file makes that so for zones of nodes too: see
:mod:`elastictrain.parallel.zones`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from elastictrain.config import AXES, MeshShape


def members(shape: MeshShape, axis: str, rank: int = 0) -> list[int]:
    """The ranks that differ from ``rank`` on one axis alone, itself among them."""
    at = AXES.index(axis)
    stride = math.prod(shape.sizes[at + 1 :])
    size = shape.sizes[at]
    first = rank - (rank // stride) % size * stride
    return [first + i * stride for i in range(size)]


def crosses_nodes(shape: MeshShape, axis: str, local_world_size: int) -> bool:
    """Is there a group of the axis on more than one node?"""
    return any(
        len({member // local_world_size for member in members(shape, axis, rank)}) > 1
        for rank in range(shape.world_size)
    )


def crosses_zones(shape: MeshShape, axis: str, zones: Sequence[str]) -> bool:
    """Is there a group of the axis in more than one of the zones, which are those of the ranks?"""
    return any(len({zones[member] for member in members(shape, axis, rank)}) > 1 for rank in range(shape.world_size))


def placement(shape: MeshShape, local_world_size: int, zones: Sequence[str] | None = None) -> str | None:
    """Where the ranks of each axis are, for the start-up summary; None where there is nothing to tell.

    Args:
        zones: of each rank, where they are known.
    """
    axes = [axis for axis in reversed(AXES) if getattr(shape, axis) > 1]
    is_one_node = shape.world_size <= local_world_size
    if not axes or (is_one_node and len(axes) == 1):
        return None
    told = []
    for axis in axes:
        where = ""
        if not is_one_node and not crosses_nodes(shape, axis, local_world_size):
            where = "in a node: "
        elif not is_one_node:
            where = "across nodes: "
            if zones is not None:
                where = "across zones: " if crosses_zones(shape, axis, zones) else "in a zone: "
        told.append(f"{axis} ({where}ranks {_ranks(members(shape, axis))}{', …' if len(axes) > 1 else ''})")
    return ", ".join(told)


def warning(shape: MeshShape, local_world_size: int) -> str | None:
    """What a placement costs that nobody can want."""
    if shape.tp == 1 or not crosses_nodes(shape, "tp", local_world_size):
        return None
    fitting = math.gcd(shape.tp, local_world_size)
    instead = f"tp={fitting}" if fitting > 1 else "dp_shard"
    return (
        f"tp={shape.tp} spans nodes of {local_world_size} ranks: every layer then waits for the network between them;"
        f" {instead} would stay within a node"
    )


def _ranks(ranks: list[int]) -> str:
    if len(ranks) <= 4:
        return ", ".join(map(str, ranks))
    return f"{ranks[0]}, {ranks[1]}, … {ranks[-1]}"
