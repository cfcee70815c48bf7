"""The agents' side of a boundary agreement: at which step do all workers of all nodes stop?

The rule, in the words of :mod:`elastictrain.elastic.cells`. Asked to stop, the agents set one limit, a little beyond
the furthest worker. A worker at a boundary below the limit acks it (promises not to pass it) and goes on; at the limit
it waits. A worker that left the limit's boundary before it saw the limit cannot promise: the limit is raised, further
each time.
When every worker has promised the same limit, it is the verdict and is never raised again, and all stop there.

Why nobody waits for ever: a waiting worker is at the limit, so all its collectives below are done and those of the
others do not need it; each of the others comes to its next boundary, and promises, or makes the limit rise, which
lets the waiting one go on. Why nobody stops alone: a worker stops only on a verdict, and a verdict needs everyone's
promise.

:func:`decide` is pure. :class:`Agreement` runs it over the node's own cells, and over several nodes through a store,
where the agent of node 0 decides. A store that fails raises what it raises (``RuntimeError``): the agreement is lost
with the rendezvous, and the agent ends.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Protocol

from elastictrain.elastic.cells import ACKED, LIMIT, PHASE, STEP, VERDICT, Cells, Phase, StopReason


@dataclass(frozen=True)
class Standing:
    """What one node's workers did about a limit (-1: there is none yet)."""

    limit: int
    furthest: int  # most finished steps of any worker; -1 before the first boundary
    passed: bool  # a worker has come to the limit, or beyond it, without a promise
    acked: bool  # every worker has promised the limit, or will never come to another boundary


@dataclass(frozen=True)
class Decision:
    """The limit that holds now, and whether it is the verdict."""

    limit: int
    final: bool


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
    return Standing(limit, furthest, passed, acked and limit >= 0)


def decide(standings: list[Standing], limit: int, margin: int) -> Decision | None:
    """The next limit, the verdict, or None: wait for more promises."""
    furthest = max(s.furthest for s in standings)
    if limit < 0:
        return Decision(furthest + margin, final=False)
    current = [s for s in standings if s.limit == limit]
    if any(s.passed for s in current):
        return Decision(furthest + margin, final=False)
    if len(current) == len(standings) and all(s.acked for s in current):
        return Decision(limit, final=True)
    return None


class Store(Protocol):
    """The part of ``torch.distributed.Store`` that is used here."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...


class Agreement:
    """One generation's agreement, on one node.

    Args:
        cells: the node's cells.
        store: shared by the nodes of this generation, with a prefix of its own; None for one node.
        node: this node's rank among ``num_nodes``.

    Attributes:
        reason: why all stop; None while nobody asked.
        step: where all stop; None while it is not agreed.
    """

    def __init__(self, cells: Cells, *, store: Store | None = None, node: int = 0, num_nodes: int = 1) -> None:
        self._cells, self._store = cells, store if num_nodes > 1 else None
        self._node, self._num_nodes = node, num_nodes
        self._margin = 1
        self._limit = -1
        self._published: Standing | None = None
        self.reason: StopReason | None = None
        self.step: int | None = None

    def ask(self, reason: StopReason) -> None:
        """All shall stop; the first reason given stays."""
        if self.reason is None:
            self.reason = reason
            if self._store is not None and not self._store.check(["asked"]):
                self._store.set("asked", reason.value)

    def tick(self) -> None:
        """Look at the cells and go one stage on; call it again and again. Cheap while nobody has asked."""
        if self.step is not None:
            return
        if self.reason is None and (own := self._cells.asked()) is not None:
            self.ask(own)
        if self._store is not None:
            self._tick_nodes(self._store)
        elif self.reason is not None:
            decision = decide([standing(self._cells, self._limit)], self._limit, self._margin)
            if decision is not None:
                self._apply(decision, self.reason)

    def _tick_nodes(self, store: Store) -> None:
        if self.reason is None:
            if not store.check(["asked"]):
                return
            self.reason = StopReason(store.get("asked").decode())
        mine = standing(self._cells, self._limit)
        if mine != self._published:
            store.set(f"standing/{self._node}", json.dumps(asdict(mine)))
            self._published = mine
        if self._node == 0:
            keys = [f"standing/{node}" for node in range(self._num_nodes)]
            if not store.check(keys):
                return
            standings = [Standing(**json.loads(store.get(key))) for key in keys]
            if (decision := decide(standings, self._limit, self._margin)) is not None:
                store.set("decision", json.dumps([asdict(decision), self.reason.value]))
                self._apply(decision, self.reason)
        elif store.check(["decision"]):
            fields, reason = json.loads(store.get("decision"))
            decision = Decision(**fields)
            if decision.final or decision.limit != self._limit:
                self._apply(decision, StopReason(reason))

    def _apply(self, decision: Decision, reason: StopReason) -> None:
        assert decision.limit >= self._limit, (decision, self._limit)
        if decision.final:
            self._cells.write(VERDICT, (decision.limit + 1) * 4 + reason.code)
            self.step, self.reason = decision.limit, reason
        else:
            self._limit = decision.limit
            self._margin *= 2  # steps shorter than the agent's tick must not outrun it for ever
            self._cells.write(LIMIT, decision.limit + 1)
