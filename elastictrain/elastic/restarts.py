"""Whether another attempt is worth it. Pure: no clock, no process.

A run may restart its workers ``max_restarts`` times without making progress; a generation that finishes at least one
step beyond the furthest step ever finished refills the budget, so that a run of weeks survives any number of separate
failures and one that fails at the same place ends soon. An error that no attempt can mend (a UsageError, an error in
loading the target, ``sys.exit``) ends the run at once, and so does the same exception, with the same message, at the
same step, twice in a row.
"""

from __future__ import annotations

from dataclasses import dataclass

from elastictrain.elastic.chain import Member
from elastictrain.elastic.report import Report


@dataclass(frozen=True)
class Failure:
    """Why a generation ended.

    Args:
        signature: equal for equal exceptions; None where a process died without one, which is never held against it.
        retry: another attempt may help.
    """

    step: int
    signature: tuple[str, str] | None = None
    retry: bool = True


@dataclass(frozen=True)
class Unexplained:
    """Workers say no more than that they have lost others. Who is gone is known once the nodes have met again.

    Args:
        line: what has happened, in words.
        reached: finished steps by then.
        shown: the report of it.
        members: the nodes of that generation. Where one of them is gone, that explains it, and costs no budget.
    """

    line: str
    failure: Failure
    reached: int
    shown: Report | None
    members: tuple[Member, ...]


class RestartBudget:
    """Counts restarts.

    Attributes:
        used: restarts since the last progress.
        repeated: the last failure was the same exception as the one before.
    """

    def __init__(self, max_restarts: int) -> None:
        self.max_restarts = max_restarts
        self.used = 0
        self.repeated = False
        self._furthest = -1
        self._last: Failure | None = None

    def __str__(self) -> str:
        return f"restart {self.used} of {self.max_restarts}"

    @property
    def refusal(self) -> str:
        """Why the last failure may not be followed by a restart: the end of a line, empty where that is plain."""
        assert self._last is not None
        if self.repeated:
            return ", as before its restart"
        is_used_up = self.used >= self.max_restarts > 0 and self._last.retry
        return f"; {self.used} restarts made no progress" if is_used_up else ""

    def may_restart(self, failure: Failure, *, reached: int) -> bool:
        """Account for a failed generation; ``reached``: its finished steps, -1 if it did not begin to train."""
        if reached > self._furthest:
            self.used, self._furthest = 0, reached
        self.repeated = (
            failure.signature is not None
            and self._last is not None
            and (failure.signature, failure.step) == (self._last.signature, self._last.step)
        )
        self._last = failure
        if not failure.retry or self.repeated or self.used >= self.max_restarts:
            return False
        self.used += 1
        return True
