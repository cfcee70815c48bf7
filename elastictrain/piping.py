"""A training step through a pipeline: all slots of this data-parallel rank at once, as its schedule wants them.

The order of hooks is that of a step without a pipeline, but for one thing: every slot begins (its batch moves to the
device, ``on_train_batch_start``) before the first is computed, and ends after the last.

On failure: see :mod:`elastictrain.parallel.pipeline`. What a pipeline cannot honour is refused by :func:`check_piped`
before anything is built.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed.tensor import DTensor

from elastictrain.compat.lightning import LightningCallback, LightningModule, is_overridden
from elastictrain.data.slots import Slot, Work
from elastictrain.errors import UnsupportedError, UsageError
from elastictrain.parallel.pipeline import Job, Pipeline
from elastictrain.parallel.relay import random_state
from elastictrain.parallel.stages import shapes_key
from elastictrain.passes import slot_share, zero_grad
from elastictrain.session import Session
from elastictrain.step_plan import StepPlan
from elastictrain.task import Task

_BACKWARD_HOOKS = ("backward", "on_before_backward", "on_after_backward")


def check_piped(session: Session) -> None:
    """
    Raises:
        UnsupportedError: the module or a callback has something of its own in the step that a pipeline takes apart.
    """
    s = session
    if (trouble := pipe_trouble(s.task, s.lightning_callbacks, s.plan)) is not None:
        raise UnsupportedError(f"{trouble.what}{trouble.why}: {trouble.remedy}")


class Trouble(NamedTuple):
    """What keeps a step out of a pipeline, in parts of a sentence."""

    what: str
    why: str
    remedy: str


def pipe_trouble(task: LightningModule, callbacks: Sequence[LightningCallback], plan: StepPlan) -> Trouble | None:
    """Why a pipeline cannot run this step; None where it can. The planner asks this too, before there is a session."""
    name = type(task).__name__
    if not isinstance(task, Task):
        return Trouble(
            f"{name} is a LightningModule",
            ", whose training_step() is one piece",
            "a pipeline needs to know where the loss is made; derive it from elastictrain.Task and define"
            " loss(outputs, batch), or use dp_shard instead of pp",
        )
    if is_overridden("training_step", task, Task):
        return Trouble(
            f"{name}.training_step() is its own",
            ", and a pipeline's stages each run a part of a step",
            "leave it out and define forward() and loss(outputs, batch), or use dp_shard instead of pp",
        )
    if not task.automatic_optimization:
        return Trouble(f"{name} has manual optimisation", ", which a pipeline cannot run", "use dp_shard instead of pp")
    for hook in _BACKWARD_HOOKS:
        own = [c for c in callbacks if is_overridden(hook, c, LightningCallback)]
        if own or is_overridden(hook, task, LightningModule):
            return Trouble(
                f"{type(own[0] if own else task).__name__}.{hook}() is overridden",
                ", and a pipeline's schedule runs the backward passes",
                "leave it out, or use dp_shard instead of pp",
            )
    if plan.precision.scale_loss:
        return Trouble(
            "fp16 needs a gradient scaler", ", which stages of a pipeline do not share", "use bf16, or no pp"
        )
    return None


class PipedStep:
    """The slots of one global batch on their way through the pipeline.

    Args:
        autocast: for the forward passes.

    Attributes:
        slots: this rank's, with their batches and what ``on_train_batch_end`` is told.
    """

    def __init__(self, session: Session, pipeline: Pipeline, autocast: Callable[[], Any] | None) -> None:
        self._tensor = session.built.tensor
        self._session, self._pipeline = session, pipeline
        self._autocast = autocast or nullcontext
        self.slots: list[tuple[Slot, Any, dict[str, Any]]] = []
        self._jobs: list[Job] = []

    def begin(self) -> None:
        self.slots, self._jobs = [], []

    def add(self, slot: Slot) -> None:
        """A slot whose batch has become the session's, with its random numbers."""
        s = self._session
        assert isinstance(s.task, Task)
        state = random_state(s.device) if self._pipeline.draws is not False else None
        self._jobs.append(Job(slot.index, (s.task.inputs(s.batch),), shapes_key(s.batch), state))
        self.slots.append((slot, s.batch, {}))

    def step(self, work: Work) -> Tensor | None:
        """:meth:`compute` as an optimizer's closure; the session's loss is None where the last stage is elsewhere."""
        s = self._session
        started = time.perf_counter()
        zero_grad(s, s.optimizers[0])
        self.compute(work)
        s.seconds[1] += time.perf_counter() - started
        return s.loss

    def compute(self, work: Work) -> None:
        """Forward and backward of all of them; gradients and running statistics of all ranks."""
        s, pipeline = self._session, self._pipeline
        s.loss = None

        def loss(outputs: Any, number: int) -> Tensor:
            return self._loss(work, outputs, number)

        pipeline.start(work.num_slots)
        with self._tensor.context() if self._tensor is not None else nullcontext():  # the one around all passes
            s.hooks.within("training_step", pipeline.train, self._jobs, loss, autocast=self._autocast)
        if self._tensor is not None:
            self._tensor.finish(s.loss)
        pipeline.finish()

    def _loss(self, work: Work, outputs: Any, number: int) -> Tensor:
        s = self._session
        assert isinstance(s.task, Task)
        slot, batch, told = self.slots[number]
        s.batch, s.batch_idx, s.batch_size = batch, slot.batch_idx, None
        loss = s.task.loss(outputs, batch)
        if not isinstance(loss, Tensor):
            raise UsageError(f"{type(s.task).__name__}.loss() returned a {type(loss).__name__}: return a tensor")
        if isinstance(loss, DTensor):
            loss = loss.full_tensor()
        loss = slot_share(s, work, slot, loss)
        share = told["loss"] = loss.detach()
        s.loss = share if s.loss is None else s.loss.double() + share  # the same sum in any order
        return loss
