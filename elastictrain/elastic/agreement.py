"""The agent's side of a boundary agreement: at which step do all workers of all nodes stop?

The rule, in the words of :mod:`elastictrain.elastic.cells`. Whoever leads asks all nodes for one limit, a little beyond the
furthest worker. A worker at a boundary below the limit acks it (promises not to pass it) and goes on; at the limit
it waits. A worker that left the limit's boundary before it saw the limit cannot promise: its node refuses, and the limit is
raised, further each time.
When every worker of every node has promised the same limit, it is agreed and never raised again, and all stop there. Until
then it may be given back, should there be no reason any more: then those who wait go on, and no limit up to that one is
ever promised again in this generation, since promises of it may still be in the cells.

Why nobody waits for ever: a waiting worker is at the limit, so all its collectives below are done and those of the
others do not need it; each of the others comes to its next boundary, and promises, or makes the limit rise, which
lets the waiting one go on. Why nobody stops alone: a worker stops only on a verdict, and a verdict needs everyone's
promise.

:class:`Agreement` does this for one node's cells. Who asks, and counts the nodes' answers, is the run's leader
(:mod:`elastictrain.elastic.leader`), and where there is only one node, :class:`OnlyNode`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from elastictrain.elastic.actions import Promise
from elastictrain.elastic.cells import ACKED, LIMIT, PHASE, STEP, VERDICT, Cells, Phase, StopReason
from elastictrain.elastic.chain import Generation


@dataclass(frozen=True)
class Standing:
    """What this node's workers did about a limit."""

    furthest: int  # most finished steps of any worker; -1 before the first boundary
    passed: bool  # a worker has come to the limit, or beyond it, without a promise
    acked: bool  # every worker has promised the limit, or will never come to another boundary


def standing(cells: Cells, limit: int) -> Standing:
    """Read the node's cells."""
    passed, acked, furthest = False, True, -1
    for view in cells.views:
        closed = view[PHASE] == Phase.CLOSED  # read first: the STEP read after it is the worker's last
        promised = view[ACKED] == limit + 1
        finished = view[STEP] - 1
        furthest = max(furthest, finished)
        # At the limit without a promise: about to ack, or it left this boundary before it saw the limit and waits, in
        # the next step, for those who wait here. Raising is right for both.
        passed = passed or (not promised and finished >= limit)
        acked = acked and (promised or closed)
    return Standing(furthest, passed, acked)


class Asks(Protocol):
    """Who asks the nodes, as this one sees it.

    Attributes:
        asked: what the workers of this generation are to promise; None: nothing, or no more.
        agreed: the generation that follows this one at a step that all have promised; None: there is none yet.
    """

    @property
    def asked(self) -> Promise | None: ...
    @property
    def agreed(self) -> Generation | None: ...
    def promise(self, asked: Promise, *, is_kept: bool, step: int) -> None: ...


class Agreement:
    """One generation's agreement, on one node.

    Args:
        cells: the node's cells.
        asks: who asks.
        why: the reason to give the workers for stopping where that generation begins; the same kind on all nodes.

    Attributes:
        reason: the one that was given; None while nothing is agreed.
        step: where all stop; None while it is not agreed.
    """

    def __init__(self, cells: Cells, asks: Asks, *, why: Callable[[Generation], StopReason]) -> None:
        self._cells, self._asks, self._why = cells, asks, why
        self._asked: Promise | None = None
        self._is_answered = False
        self._highest = -1  # of all limits that the cells have ever had
        self.reason: StopReason | None = None
        self.step: int | None = None

    def tick(self) -> None:
        """Look at the cells and go one stage on; call it again and again. Cheap while nobody asks."""
        if self.step is not None:
            return
        asked, agreed = (
            self._asks.asked,
            self._asks.agreed,
        )  # in this order: once it is agreed, nothing is asked any more
        if agreed is not None:
            self.step, self.reason = agreed.boundary, self._why(agreed)
            self._cells.write(VERDICT, (agreed.boundary + 1) * 8 + self.reason.code)
            return
        if asked is not self._asked:
            self._take(asked)
        if self._asked is not None and not self._is_answered:
            self._answer(self._asked)

    def _take(self, asked: Promise | None) -> None:
        self._asked, self._is_answered = asked, False
        if asked is None:
            self._cells.write(LIMIT, 0)
        elif asked.boundary > self._highest:
            self._highest = asked.boundary
            self._cells.write(LIMIT, asked.boundary + 1)

    def _answer(self, asked: Promise) -> None:
        here = standing(self._cells, asked.boundary)
        is_stale = self._cells.views[0][LIMIT] != asked.boundary + 1  # it was given back once, or is below one that was
        if is_stale or here.passed or here.acked:
            self._is_answered = True
            is_kept = here.acked and not here.passed and not is_stale
            step = max(here.furthest, self._highest) if is_stale else here.furthest
            self._asks.promise(asked, is_kept=is_kept, step=step)


class OnlyNode:
    """Who asks where there is one node."""

    def __init__(self) -> None:
        self.asked: Promise | None = None
        self.agreed: Generation | None = None
        self.step = -1  # finished by the furthest worker; kept up to date from outside
        self._ahead = 1

    def notice(self) -> None:
        """All workers shall stop."""
        if self.asked is None:
            self._ask(self.step)

    def promise(self, asked: Promise, *, is_kept: bool, step: int) -> None:
        if is_kept:
            self.agreed = Generation(boundary=asked.boundary, is_paused=True)
        else:
            self._ask(step)

    def _ask(self, step: int) -> None:
        self.asked = Promise(0, step + self._ahead)
        self._ahead *= 2  # steps shorter than the agent's tick must not outrun it for ever
