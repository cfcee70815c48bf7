"""Which machines are near each other, as a file says, and the order of ranks that follows.

A topology file (YAML or JSON) names the zone of every node, such as the switch that it is on::

    node0: switch-a
    node1: switch-a
    node2: switch-b

Ranks are numbered when the process group is made, zone by zone and node by node, so that the groups of the inner axes of
the mesh (``tp``, ``cp``, ``dp_shard``) stay within a zone wherever they can, and ``dp_replicate`` and ``pp`` cross. The
first rank stays the first. A node is known by its ``--local-addr``, or by its host name, with the domain or without.

On failure: a file that cannot be used, and a node that it does not name, are a UsageError on every rank alike, before
there is a process group. Nodes that it names and that are not here are left out: machines come and go.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from elastictrain.errors import UsageError

if TYPE_CHECKING:
    from torch.distributed import Store


@dataclass(frozen=True)
class Zones:
    """Where the ranks are, by their numbers in the process group.

    Args:
        nodes: the node of each rank.
        zones: the zone of each rank.
        absent: nodes of the file that are not here.
    """

    nodes: tuple[str, ...]
    zones: tuple[str, ...]
    absent: tuple[str, ...] = ()

    def __str__(self) -> str:
        told = []
        for zone in dict.fromkeys(self.zones):
            here = [rank for rank, other in enumerate(self.zones) if other == zone]
            nodes = dict.fromkeys(self.nodes[rank] for rank in here)
            told.append(f"{zone}: {', '.join(nodes)} (ranks {_spans(here)})")
        absent = f"; not here: {', '.join(self.absent)}" if self.absent else ""
        return "; ".join(told) + absent


def read_zones(path: str) -> dict[str, str]:
    """Node -> zone.

    Raises:
        UsageError: the file cannot be read, is not YAML or JSON, or is anything but one zone for each node.
    """
    import yaml

    from elastictrain.yamlfile import reading

    with reading(f"topology {path}", kinds="YAML or JSON"), open(path, encoding="utf-8") as file:
        root = yaml.compose(file, yaml.SafeLoader)
    if not isinstance(root, yaml.MappingNode) or not root.value:
        raise UsageError(f"topology {path} names no node: write one 'node: zone' a line")
    zones: dict[str, str] = {}
    for key, value in root.value:  # as they are written: a zone that is called 1 is no number
        where = f"topology {path}, line {key.start_mark.line + 1}"
        if not isinstance(key, yaml.ScalarNode) or not isinstance(value, yaml.ScalarNode) or not value.value:
            raise UsageError(f"{where}: write the name of one zone for each node, as in 'node0: switch-a'")
        if key.value in zones:
            raise UsageError(f"{where}: {key.value} is named twice: keep one of them")
        zones[key.value] = value.value
    return zones


def node_names(given: str | None) -> list[str]:
    """By which this machine may be called in a topology file, the first one first.

    Args:
        given: its ``--local-addr``.
    """
    host = socket.gethostname()
    return [*([given] if given else []), host, *([host.partition(".")[0]] if "." in host else [])]


def in_order(nodes: Sequence[str], zones: Mapping[str, str], *, block: int = 1) -> list[int]:
    """The ranks in the order in which they shall be numbered; the first stays the first.

    Args:
        nodes: for each rank the node that it is on.
        zones: node -> zone.
        block: ranks that shall be in one zone if they can: those of a ``dp_shard`` group and all that is within it.
    """
    ranks: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        ranks.setdefault(node, []).append(rank)
    members: dict[str, list[str]] = {}
    for node in ranks:
        members.setdefault(zones[node], []).append(node)
    # What makes whole blocks of a zone stands together, what is left of the zones behind it: both multiples of a block.
    blocks: list[int] = []
    left: list[int] = []
    for names in members.values():
        inside, whole = 0, 0
        for index, node in enumerate(names):
            inside += len(ranks[node])
            whole = index + 1 if inside % block == 0 else whole
        blocks += [rank for node in names[:whole] for rank in ranks[node]]
        left += [rank for node in names[whole:] for rank in ranks[node]]
    return [*blocks, *left] if not left or left[0] != 0 else [*left, *blocks]


def number(
    store: Store, path: str, *, rank: int, world_size: int, names: Sequence[str], block: int
) -> tuple[int, Zones]:
    """This process' number among the ranks, by the file that rank 0 reads; a collective.

    Args:
        rank: as the launcher counts.
        names: :func:`node_names`.

    Raises:
        UsageError: see :func:`read_zones`; or a node of a rank is not in the file.
    """
    store.set(f"names/{rank}", json.dumps(list(names)))
    if rank == 0:
        everyone = [json.loads(store.get(f"names/{other}")) for other in range(world_size)]
        try:
            store.set("order", json.dumps(_decide(path, everyone, block)))
        except UsageError as error:
            store.set("order", json.dumps({"refused": str(error)}))
    answer = json.loads(store.get("order"))
    if "refused" in answer:
        store.set(f"heard/{rank}", "")
        if rank == 0:  # its process keeps the store
            store.wait([f"heard/{other}" for other in range(world_size)])
        raise UsageError(answer["refused"])
    order, nodes, zones = answer["order"], answer["nodes"], answer["zones"]
    placed = Zones(tuple(nodes[i] for i in order), tuple(zones[nodes[i]] for i in order), tuple(answer["absent"]))
    return order.index(rank), placed


def _decide(path: str, everyone: Sequence[Sequence[str]], block: int) -> dict[str, object]:
    zones = read_zones(path)
    nodes = [next((name for name in names if name in zones), None) for names in everyone]
    known = [node for node in nodes if node is not None]
    if unknown := [names for names, node in zip(everyone, nodes, strict=True) if node is None]:
        others = f" (also known as {', '.join(unknown[0][1:])})" if len(unknown[0]) > 1 else ""
        raise UsageError(f"topology {path} names no zone for the node {unknown[0][0]}{others}: add a line for it")
    absent = sorted(zones.keys() - set(known))
    return {
        "order": in_order(known, zones, block=block),
        "nodes": known,
        "zones": {node: zones[node] for node in known},
        "absent": absent,
    }


def _spans(ranks: Sequence[int]) -> str:
    """``0-3, 6``."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
