"""Who should be in the next generation, of those that are there. Pure.

Survivors keep their order, newcomers come behind them, and the surplus stands by. Hosts that are lost again and again are
kept out for a while (see :mod:`elastictrain.elastic.flapping`), unless nobody would train without them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from elastictrain.elastic.chain import Generation, Loss, Member, Size
from elastictrain.elastic.decisions import natural
from elastictrain.elastic.flapping import Flapping
from elastictrain.elastic.nodes import Node, neighbours
from elastictrain.elastic.timing import Timing


@dataclass(frozen=True)
class Wanted:
    """
    Args:
        members: of the next generation; where they are not enough, all that are there.
        kept_out: nodes that may not come in yet: how often their hosts were lost, and for how many seconds still.
    """

    members: tuple[Member, ...]
    kept_out: Mapping[str, tuple[int, float]]


def choose_members(
    old: Generation,
    nodes: Mapping[str, Node],
    size: Size,
    *,
    timing: Timing,
    flapping: Flapping,
    losses: tuple[Loss, ...],
    now: float,
    is_forced: bool,
) -> Wanted:
    """
    Args:
        nodes: that are there, by name.
        losses: of hosts, as the log is to have them from now on.
        is_forced: members that train are lost, or their workers: what survivors hold in memory is needed.
    """
    before = [one.node for one in old.members]
    stay = [node for node in before if node in nodes and not nodes[node].is_leaving]
    known, hosts = set(before), {nodes[name].member.host for name in before if name in nodes}
    new = [name for name, node in nodes.items() if node.is_ready and not node.is_leaving and name not in known]
    waits: dict[str, tuple[int, float]] = {}
    for name in new if losses else ():
        host = nodes[name].member.host
        times, seconds = flapping.wait(host, losses, now=now)
        if seconds > 0 and host not in hosts:
            waits[name] = times, seconds
    may = [name for name in new if name not in waits]
    missing, soonest = size.min_nodes - len(stay) - len(may), sorted(waits, key=lambda name: waits[name][1])
    if 0 < missing <= len(waits):  # nobody would train without them
        may += soonest[:missing]
    kept_out = {name: waits[name] for name in soonest if name not in may}
    there = [nodes[name].member for name in stay + sorted(may, key=natural)]
    if not is_forced:
        return Wanted(timing.choose(there, size), kept_out)
    most = replace(size, max_nodes=max(size.max_nodes, len(stay)))
    return Wanted(timing.choose(there, most, rather=neighbours(before, gone=set(before) - set(nodes))), kept_out)
