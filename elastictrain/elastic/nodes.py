"""The nodes of a run as its leader sees them, and how soon they will have come to a step. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from elastictrain.elastic.chain import Member

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


def boundary_for(members: Sequence[Node], *, least: int, at: float) -> int:
    """The first step that none of them will have passed at that moment, and at least so many ahead of the furthest."""
    return max(max(one.step for one in members) + least, math.ceil(max(one.expected(at) for one in members)))
