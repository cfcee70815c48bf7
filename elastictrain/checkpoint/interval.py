"""How often to save: seldom enough to cost little, often enough to lose little when something fails.

A save every τ seconds costs training C/τ of its time; a failure every M seconds loses τ/2 of work on average. Young's
optimum is τ = sqrt(2·C·M) (J. W. Young, A first order approximation to the optimum checkpoint interval, 1974); Daly's,
which is used here, also holds where C is not small beside M (J. T. Daly, A higher order estimate of the optimum checkpoint
interval for restart dumps, 2006, equation 37).

C is measured: the seconds that training stood still for a save, and a tenth of those for which it was written in the
background, which slow the steps meanwhile. M is given, or estimated from the run's own past: with n failures in T seconds
of training, (ASSUMED + T) / (1 + n). So a new run begins with what is assumed, and every failure makes it save more often.

Pure arithmetic; it cannot fail.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

ASSUMED = 6 * 3600.0  # seconds between failures of a run that nothing is known of: a few spot machines
UNKNOWN = 300.0  # seconds between saves while no save has been measured
BACKGROUND = 0.1  # what a second of writing in the background costs training, at most
LARGEST = 3600.0  # no estimate is worth the loss of more than an hour


def optimum(cost: float, between_failures: float) -> float:
    """Daly's interval between saves, in seconds of training, for a save that costs ``cost`` seconds."""
    if cost >= 2 * between_failures:
        return between_failures
    part = cost / (2 * between_failures)
    return math.sqrt(2 * cost * between_failures) * (1 + math.sqrt(part) / 3 + part / 9) - cost


@dataclass
class Interval:
    """The interval of one run, as saves are measured.

    Args:
        given: mean seconds between failures of the whole job; None estimates it.
        num_failures: of this run before this start.
        trained: seconds of training in the state that this start goes on from.
    """

    given: float | None = None
    num_failures: int = 0
    trained: float = 0.0
    stalled: float | None = None  # seconds, of the last save
    written: float = 0.0
    _told: float = 0.0

    @property
    def between_failures(self) -> float:
        return self.given if self.given is not None else (ASSUMED + self.trained) / (1 + self.num_failures)

    @property
    def cost(self) -> float | None:
        """Seconds of training that a save costs; None before the first."""
        return None if self.stalled is None else self.stalled + BACKGROUND * self.written

    @property
    def seconds(self) -> float:
        """From one save to the next; at least what two take to be written."""
        if self.cost is None:
            return UNKNOWN
        return max(min(optimum(self.cost, self.between_failures), LARGEST), 2 * self.written)

    def has_changed(self, written: float) -> bool:
        """After a save that was written in so many seconds: is it to be said how often saves are made, for the first time
        or because that has changed much?"""
        if self.cost is None:
            return False
        self.written = written
        if self._told and 2 / 3 < self.seconds / self._told < 1.5:
            return False
        self._told = self.seconds
        return True

    def __str__(self) -> str:
        assert self.cost is not None
        if self.given is not None:
            how = "given"
        elif self.num_failures:
            how = f"{self.num_failures} in {_time(self.trained)} of training"
        else:
            how = "assumed"
        return (
            f"checkpoints every {_time(self.seconds)}: one costs training {_time(self.cost)}, and a failure comes every"
            f" {_time(self.between_failures)} ({how})"
        )


def _time(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 5400 else f"{seconds / 3600:.3g} h"
