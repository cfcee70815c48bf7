"""Where this node's time goes while it trains, and what all nodes' time went into, on log steps.

Ranks meet on log steps anyway: there each node tells its account so far, and each rank how long it was busy, in the sum that
is made in any case. So rank 0 knows the goodput of the whole run, and every node how long it waited for slower ranks.

What earlier starts of the run spent is read from the ledger beside training (:mod:`elastictrain.metrics.earlier`); goodput
is logged from then on.

On failure: a ledger that cannot be read is a warning, and no goodput is logged. Nothing else here can fail.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from elastictrain.metrics.console import event_line, make_console, print_line
from elastictrain.metrics.earlier import Earlier
from elastictrain.metrics.goodput import CAUSES, Goodput, Recent, goodput
from elastictrain.session import Session

_PHASES = ("detect", "rendezvous", "waiting", "rebuild", "restore")  # of what comes before a first step
_VIEW_EVERY = 1.0  # seconds
_MANY = 1024  # ranks, from which on they do not tell how busy they were


class Account:
    """Keeps the session's :class:`~elastictrain.metrics.goodput.TimeBook` between start and end of training.

    Attributes:
        is_new: no step has been done yet.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._first_step = session.counters.step
        self._times = np.zeros((2, session.ranks.world_size), np.float32)  # of all ranks, since they were last told
        self._viewed, self._view_due = session.counters.step, 0.0  # finished steps then; when it is due again
        # Seconds since training began, when they were last looked at.
        self._data = self._busy = self._met = self._fed = 0.0
        self._recent = Recent()
        self._first = goodput(session.begun) if session.is_first_start else None
        self._has_peers = 1 < session.ranks.world_size <= _MANY
        self.is_new = True
        self._untold: dict[str, Any] | None = None  # a recovery whose first step is done

    def settle(self) -> None:
        """Since the last entry there were steps, and in them waits for data."""
        data = self._session.seconds[0]
        self._session.times.settle(data=data - self._data)
        self._data = data

    def first_step(self, seconds: float) -> dict[str, float]:
        """The first step of this start is done, and took so long; what there is to log about a recovery."""
        s = self._session
        self.is_new = False
        self.settle()
        s.times.doing = "productive"
        if s.recovery is None or not s.ranks.is_main:
            return {}
        was = s.recovery
        phases = {cause: s.times.seconds[cause] for cause in _PHASES}
        now = time.time()
        event = {
            "cause": was.cause,
            "planned": was.is_planned,
            "from_step": max(was.reached, 0),
            "resumed_step": self._first_step,
            "source": s.source,
            "lost_steps": max(0, was.reached - self._first_step),
            "seconds": {**phases, "first_step": seconds, "total": now - was.ended},
            "ranks": s.ranks.world_size,
            "nodes": s.membership.num_nodes,
            "nodes_before": was.nodes,
            "mesh": str(s.mesh.shape),
        }
        self._untold = event
        return {f"elastic/{'change' if was.is_planned else 'recovery'}_seconds": now - was.ended}

    def tell(self) -> None:
        """Who trains has changed: a line in the ledger, and one for a person. On rank 0, once the first step is reported."""
        event, self._untold = self._untold, None
        if event is None:
            return
        ledger = self._session.ledger
        if ledger is not None:
            ledger.note("recovery", time=time.time(), **event)
            ledger.flush(wait=0.0)  # the next loss may be this very process
        print_line(f"elastictrain: {event_line(event)}", console=make_console())

    # ---- log steps -------------------------------------------------------------------------------------------------

    def told(self) -> list[float]:
        """What this rank adds to the sum over ranks."""
        s = self._session
        self.settle()
        spent = list(s.times.seconds.values()) if s.accounts else [0.0] * len(CAUSES)
        if not self._has_peers:
            return spent
        times = [0.0] * (2 * s.ranks.world_size)  # of all ranks: how long they were busy, and how long waiting for data
        data, computing, optimizing, meeting = s.seconds
        times[s.ranks.rank] = data + computing + optimizing - meeting - self._busy
        times[s.ranks.world_size + s.ranks.rank] = data - self._fed
        self._fed = data
        return spent + times

    def heard(self, sums: list[float]) -> dict[str, float]:
        """What comes of the sum; what there is to log."""
        s = self._session
        if self._has_peers:
            busy = sums[len(CAUSES) : len(CAUSES) + s.ranks.world_size]
            self._view(sums[len(CAUSES) :])
            mine, met = busy[s.ranks.rank], s.seconds[3]
            waited = min(met - self._met, max(busy) - mine)  # no longer than it waited at all
            s.times.move(waited, source="productive", to="straggling")
            self._busy, self._met = self._busy + mine, met
        if not s.ranks.is_main:
            return {}
        before = self._before()
        if before is None:
            return {}
        so_far = before.plus(sums[: len(CAUSES)])
        recent = self._recent.percent(time.monotonic(), so_far)
        values = {f"goodput/lost/{cause}": seconds for cause, seconds in so_far.lost.items()}
        for name, percent in (("percent", so_far.percent), ("percent_recent", recent)):
            if percent is not None:
                values[f"goodput/{name}"] = percent
        return values

    def _view(self, times: list[float]) -> None:
        """Each rank's times, of a mean step since they were last told, to TensorBoard; once a second is enough."""
        s, c = self._session, self._session.counters
        if s.recorder is None or not s.ranks.is_main:
            return
        self._times += np.array(times, np.float32).reshape(2, -1)
        if (now := time.monotonic()) < self._view_due:
            return
        means = self._times / np.float32(c.step + 1 - self._viewed)
        s.recorder.log_ranks(c.step + 1, c.samples, means, epoch=c.epoch, shape=s.mesh.shape)
        self._times[:] = 0.0
        self._viewed, self._view_due = c.step + 1, now + _VIEW_EVERY

    def _before(self) -> Goodput | None:
        """What earlier starts spent; None while that is being read."""
        s = self._session
        if self._first is not None or s.ledger is None or s.run_dir is None:
            return self._first
        if s.earlier is None:
            s.earlier = Earlier(s.run_dir, s.begun)
        return s.earlier.spent
