"""When learning-rate schedulers step, as Lightning has it: by optimizer steps or by epochs, or on a monitored value.

On failure: a scheduler that monitors what nobody logs is a :class:`~elastictrain.errors.UsageError`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from elastictrain.errors import UsageError
from elastictrain.session import Session


class Schedules:
    """The schedulers of a session, with automatic optimisation."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def step(self, interval: str, count: int, *, plateau: bool = False) -> None:
        """Step the schedulers of this interval; ``count`` batches or epochs are done.

        Args:
            plateau: those that monitor a value, which step later than the others: after the validation.
        """
        s = self._session
        if not s.schedulers or not s.task.automatic_optimization:
            return
        for config in s.schedulers:
            if config.reduce_on_plateau != plateau or config.interval != interval or count % config.frequency:
                continue
            metric = self._monitored(config.monitor or "") if plateau else None
            if plateau and metric is None:
                if not config.strict:
                    continue
                raise UsageError(
                    f"a ReduceLROnPlateau scheduler monitors {config.monitor!r}, which is not logged;"
                    f" there are: {', '.join(sorted(s.view.callback_metrics)) or 'none'}"
                )
            scheduler: Any = config.scheduler
            if "lr_scheduler_step" in s.hooks.own:
                s.hooks("lr_scheduler_step", scheduler, metric)
            elif metric is None:
                scheduler.step()
            else:
                scheduler.step(metric)

    def _monitored(self, name: str) -> Tensor | None:
        """A logged value: the mean over the ranks that have it, so that all of them go on with one learning rate."""
        s = self._session
        value: Tensor | None = s.view.callback_metrics.get(name)
        if s.ranks.world_size == 1:
            return value
        total, count = s.mesh.sum([0.0 if value is None else value.item(), value is not None])
        return torch.tensor(total / count) if count else None
