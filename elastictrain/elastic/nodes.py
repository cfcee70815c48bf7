"""The nodes of a run as its leader sees them: how soon they will have come to a step, and who is silent too long. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from elastictrain.elastic.chain import Member
from elastictrain.elastic.timing import Timing

PACE_SECONDS = 0.1  # over less than that, it is not known how fast steps are
LONGEST_WRITE = 2.0  # seconds: storage that takes longer has been out of reach, and may be back


@dataclass
class Node:
    """A node as the leader sees it."""

    member: Member
    link: int
    last: float
    is_ready: bool
    step: int
    is_leaving: bool = False
    promised: int = -1
    was_told: bool = False  # that it may go
    waits: bool = False  # it is kept out, and knows
    pace: float = 0.0  # steps a second, lately
    counted: tuple[float, int] = (0.0, 0)  # a moment, and the steps that were finished then: where that is counted from

    def reached(self, step: int, now: float) -> None:
        """So many steps are finished; this is a sign of life."""
        self.last, self.step = now, step
        since, before = self.counted
        if step < before or before < 0:
            self.pace, self.counted = 0.0, (now, step)
        elif step > before and now - since >= PACE_SECONDS:  # from one finished step to another: one may take long
            self.pace, self.counted = (step - before) / (now - since), (now, step)

    def expected(self, at: float) -> float:
        """How many steps it will have finished then."""
        return self.step + self.pace * (at - self.last)


class Silence:
    """Who is silent, and for how long.

    Args:
        nodes: by name; others add and remove them.
    """

    def __init__(self, nodes: Mapping[str, Node], timing: Timing, *, now: float) -> None:
        self._nodes, self._timing = nodes, timing
        self._look_at = now
        self._suspected_at: float | None = None
        self._has_asked = False

    @property
    def deadline(self) -> float:
        """When to look again."""
        if self._suspected_at is None:
            return self._look_at
        return min(self._look_at, self._suspected_at + self._timing.probe)

    def suspect(self, *, now: float) -> None:
        """A worker has lost a peer: whoever does not answer soon is lost."""
        if self._suspected_at is None:
            self._suspected_at, self._has_asked = now, False

    def thaw(self, *, now: float) -> None:
        """This process was stopped for a while: nobody else is to blame for silence."""
        for node in self._nodes.values():
            node.last = now
        self._suspected_at = None

    def look(self, *, now: float) -> tuple[list[str], bool]:
        """Those that are lost, and whether everybody is to be asked for a sign of life."""
        late: list[str] = []
        if now >= self._look_at:
            ttl = self._timing.ttl_for(len(self._nodes))
            self._look_at = now + ttl / 8
            late = [name for name, node in self._nodes.items() if now - node.last > ttl]
        asks = self._suspected_at is not None and not self._has_asked
        self._has_asked = self._has_asked or asks
        if self._suspected_at is not None and now >= self._suspected_at + self._timing.probe:
            late += [name for name, node in self._nodes.items() if node.last < self._suspected_at]
            self._suspected_at = None
        return list(dict.fromkeys(late)), asks


def neighbours(members: Sequence[str], *, gone: Collection[str]) -> set[str]:
    """Those next to one that is gone, in the order of ranks: each node's keeper has a copy of what the one before holds, so
    of two neighbours the one that is left may alone hold something."""
    pairs = zip(members, [*members[1:], *members[:1]], strict=True)
    return {left for pair in pairs for left in pair if not set(gone).isdisjoint(pair)} - set(gone)


def boundary_for(members: Sequence[Node], *, least: int, at: float) -> int:
    """The first step that none of them will have passed at that moment, and at least so many ahead of the furthest."""
    return max(max(one.step for one in members) + least, math.ceil(max(one.expected(at) for one in members)))
