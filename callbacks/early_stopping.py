"""Stop when a validation metric no longer gets better."""

from __future__ import annotations

import difflib
import logging
import math
from collections.abc import Mapping
from typing import Any

from elastictrain.callback import Callback, ValidationInfo
from elastictrain.errors import UsageError

_log = logging.getLogger(__name__)


class EarlyStopping(Callback):
    """Stop after ``patience`` validations in a row without a better ``monitor``.

    What it has seen is part of the state, so a restart changes nothing. A NaN is never better. All ranks see the same
    metrics and so answer alike.

    Args:
        monitor: name of a metric that validation logs.
        patience: validations to wait; 1 stops at the first that is not better.
        mode: "min" if lower is better, "max" if higher is.
        min_delta: by how much it must be better to count.

    Raises:
        UsageError: an argument is out of range; at the first validation: there is no metric of that name.
    """

    def __init__(self, monitor: str, *, patience: int = 3, mode: str = "min", min_delta: float = 0.0) -> None:
        if mode not in ("min", "max"):
            raise UsageError(f'EarlyStopping(mode={mode!r}): use "min" if lower is better, "max" if higher is')
        if not isinstance(patience, int) or isinstance(patience, bool) or patience < 1:
            raise UsageError(f"EarlyStopping(patience={patience!r}) must be a whole number of validations, at least 1")
        if not 0 <= min_delta < math.inf:
            raise UsageError(f"EarlyStopping(min_delta={min_delta!r}) must be at least 0")
        self.monitor = monitor
        self.patience = patience
        self.mode = mode
        self.min_delta = min_delta
        self.best: float | None = None
        self.best_step: int | None = None
        self.num_bad = 0  # validations since the best one

    def on_validation_end(self, info: ValidationInfo) -> None:
        if self.monitor not in info.metrics:
            near = difflib.get_close_matches(self.monitor, info.metrics, n=1)
            raise UsageError(
                f"EarlyStopping(monitor={self.monitor!r}): validation logs no such metric; it logs"
                f" {', '.join(sorted(info.metrics)) or 'none'}" + (f"; did you mean {near[0]!r}?" if near else "")
            )
        value = float(info.metrics[self.monitor])
        if self._is_better(value):
            self.best, self.best_step, self.num_bad = value, info.step, 0
            return
        self.num_bad += 1
        if self.num_bad == self.patience:
            _log.info("%s has not improved since step %s: training stops", self.monitor, self.best_step)

    def _is_better(self, value: float) -> bool:
        if math.isnan(value):
            return False
        if self.best is None:
            return True
        gain = self.best - value if self.mode == "min" else value - self.best
        return gain > self.min_delta

    def should_stop(self) -> bool:
        return self.num_bad >= self.patience

    def state_dict(self) -> Mapping[str, Any]:
        return {"best": self.best, "best_step": self.best_step, "num_bad": self.num_bad}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.best, self.best_step, self.num_bad = state["best"], state["best_step"], state["num_bad"]
