"""What a sample costs in floating-point operations: the task's own figure, else counted once on the meta device.

The count is of matrix products, convolutions and attention in the forward and backward pass of a copy without weights,
made before the model is laid out: of the whole model, nothing of it computed twice, attention without regard to its mask
(``torch.utils.flop_counter``). What recomputation adds is not in it, which makes it the measure for model FLOPs
utilisation (Chowdhery et al. 2022, arXiv:2204.02311, appendix B).

Only what a ``Task`` says in ``forward`` and ``loss`` is run a second time; a ``training_step`` may do more than compute,
so without a ``loss`` only the task's ``flops_per_sample()`` counts. The copy has attributes of its own, so that nothing of
the task is changed. Where no callback asks, nothing is copied. On failure: code that needs values, or attributes that cannot
be copied, cannot be counted, which is told to the log, and the figure is not known.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from elastictrain.compat.lightning import NOT_OF_THE_MODEL, LightningModule, attach_log, is_overridden
from elastictrain.compat.self_log import samples_in_batch
from elastictrain.compat.torch import on_meta, tree_map
from elastictrain.data.randomness import generators_kept
from elastictrain.planning import detached
from elastictrain.rundir import first_line
from elastictrain.session import Session
from elastictrain.task import Task

log = logging.getLogger(__name__)


class FlopsPerSample:
    """Call it once a step has run, for then there is a batch. The answer is kept, as ``session.counted_flops``.

    Args:
        session: its task is built, and not laid out yet. Where it knows the answer, nothing is counted: who goes on after a
            failure has other things to compute.
    """

    def __init__(self, session: Session) -> None:
        self._session: Session | None = session
        self._value: float | None = None
        self._copy: Task | None = None
        task = session.task
        is_asked = session.counted_flops is None and any(callback.needs_flops for callback in session.callbacks)
        with _or_not_at_all():
            if is_asked and isinstance(task, Task) and is_overridden("loss", task, Task) and _own(task) is None:
                self._copy = _apart(task)

    def __call__(self) -> float | None:
        if self._session is not None:
            session, self._session = self._session, None
            with _or_not_at_all():
                self._value = _own(session.task) if session.counted_flops is None else session.counted_flops
                whole = session.mesh.shape.cp == 1  # else a rank's batch has a part of the tokens
                if self._value is None and self._copy is not None and whole and session.batch is not None:
                    self._value = count(self._copy, session.batch) / samples_in_batch(session)
            session.counted_flops = self._value
            self._copy = None
        return self._value


@contextmanager
def _or_not_at_all() -> Iterator[None]:
    """Around what runs or copies the user's code, without values: training does not depend on it."""
    try:
        yield
    except Exception as error:
        log.info("the FLOPs of a sample cannot be counted (%s): define flops_per_sample()", first_line(error))


def _own(task: LightningModule) -> float | None:
    value = getattr(task, "flops_per_sample", lambda: None)()
    return None if value is None else float(value)


def _apart(task: Task) -> Task:
    """A copy of the task on the meta device, for :func:`count`."""
    copied = detached(on_meta(task, without=NOT_OF_THE_MODEL))
    attach_log(copied, lambda *args, **kwargs: None)
    assert isinstance(copied, Task)
    return copied


def count(task: Task, batch: Any) -> int:
    """FLOPs of forward, loss and backward of one microbatch.

    Args:
        task: on the meta device.

    Raises:
        Exception: whatever code raises that needs values.
    """

    def like(value: Any) -> Any:
        return torch.empty_like(value, device="meta") if isinstance(value, Tensor) else value

    counter = FlopCounterMode(display=False)
    with generators_kept(), warnings.catch_warnings(), torch.enable_grad(), torch.device("meta"):
        warnings.simplefilter("ignore")
        batch = tree_map(like, batch)
        with counter:
            task.loss(task(task.inputs(batch)), batch).backward()
    return counter.get_total_flops()
