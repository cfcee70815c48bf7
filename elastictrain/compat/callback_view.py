"""The trainer as Lightning's own callbacks see it: :class:`TrainerView` and the few internals that they reach for.

Learning-rate monitor, early stopping, progress bars, model summary, throughput, averaging: what they touch is here, each
name pinned by a test that runs that callback, and nobody else gets it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from elastictrain.compat.trainer_view import TrainerView


class CallbackView(TrainerView):
    """What Lightning's own callbacks get.

    Args:
        log: ``(session, metrics, step=…)``: sends metrics to the user's loggers.
    """

    def __init__(self, session: Any, *, log: Callable[..., None], **loop: Any) -> None:
        super().__init__(session, **loop)
        self._logger_connector = _LoggerConnector(session, log)
        self.fit_loop = _FitLoop(session, self)
        counted = SimpleNamespace(total=_Evaluated(session))
        self._evaluation_loop = SimpleNamespace(batch_progress=counted)
        self.predict_loop = SimpleNamespace(batch_progress=counted)


class _LoggerConnector:
    def __init__(self, session: Any, log: Callable[..., None]) -> None:
        self._session, self._log = session, log

    @property
    def should_update_logs(self) -> bool:
        s = self._session
        step = s.counters.step + 1 if s.stage == "train" else s.pass_batches
        return bool(step % s.settings.log_every == 0 or s.should_stop)

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        self._session.logged_metrics.update(metrics)
        self._log(self._session, metrics, step=step)


class _Evaluated:
    """Batches of the validations in this epoch."""

    def __init__(self, session: Any) -> None:
        self._session = session

    @property
    def ready(self) -> int:
        return int(self._session.epoch_batches)


class _EpochLoop:
    def __init__(self, session: Any) -> None:
        self._session = session

    @property
    def _batches_that_stepped(self) -> int:
        return int(self._session.counters.step)

    @property
    def global_step(self) -> int:
        return int(self._session.counters.global_step)

    def _should_check_val_epoch(self) -> bool:
        return True


class _FitLoop:
    def __init__(self, session: Any, view: TrainerView) -> None:
        self._session, self._view = session, view
        self.epoch_loop = _EpochLoop(session)
        self._more_batches = 0

    @property
    def max_epochs(self) -> int:
        return self._view.max_epochs

    @max_epochs.setter
    def max_epochs(self, value: int) -> None:
        self._session.set_max_epochs(value)

    @property
    def max_batches(self) -> int | float:
        return self._view.num_training_batches + self._more_batches

    @max_batches.setter
    def max_batches(self, value: int) -> None:
        # SWA counts one more in its last epoch, which is for running statistics alone, and accumulates over all of them.
        self._more_batches = value - int(self._view.num_training_batches)

    @property
    def total_batch_idx(self) -> int:
        per_epoch = self._view.num_training_batches
        before = 0 if math.isinf(per_epoch) else self._view.current_epoch * int(per_epoch)
        return int(before + self._session.batch_idx)

    def _should_accumulate(self) -> bool:
        return (self._session.batch_idx + 1) % self._session.accumulation != 0 and not self._view.is_last_batch

    @property
    def _skip_backward(self) -> bool:
        return bool(self._session.skip_backward)

    @_skip_backward.setter
    def _skip_backward(self, value: bool) -> None:
        self._session.skip_backward = value
