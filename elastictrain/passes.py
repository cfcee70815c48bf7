"""The forward and backward pass of one slot, with Lightning's hooks around them.

Every slot's loss is divided so that the losses of a global batch, of all slots on all ranks, add up to its mean; so do the
gradients, which the last pass of a rank sums over the ranks.

On failure: an exception leaves the gradients half done; nobody steps with them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from elastictrain.compat.lightning import num_parameters
from elastictrain.data.slots import Slot, Work
from elastictrain.errors import UnsupportedError, UsageError
from elastictrain.parallel.shard import DTYPES, Sharded
from elastictrain.parallel.tensor import whole
from elastictrain.session import Session

_NOTHING = nullcontext()  # may be entered again and again


class Passes:
    """Computes slots of this rank.

    What a pass looks at every time is looked up once, here: on a small model the look-ups cost as much as the arithmetic.

    Attributes:
        autocast: makes the context of forward passes; None for full precision.
    """

    def __init__(self, session: Session) -> None:
        s = self._session = session
        built = s.built
        self._hooks, self._own, self._anyone = s.hooks, s.hooks.own, s.hooks.anyone
        self._fields = s.task.__dict__
        self._sharded, self._gradients, self._tensor = built.sharded, built.gradients, built.tensor
        self._splits_loss = built.tensor is not None and built.tensor.splits_loss
        self._context = built.context
        self._stats = built.running_stats if built.running_stats else None
        self._meets = any(part is not None for part in (built.sharded, built.gradients, built.tensor))
        self._takes_index = num_parameters(s.task.training_step) > 1
        compute = s.plan.precision.compute
        self.autocast: Callable[[], Any] | None = None
        if compute != "fp32":
            self.autocast = lambda: torch.autocast(s.device.type, dtype=DTYPES[compute])

    # ---- forward ---------------------------------------------------------------------------------------------------

    def forward(self, slot: Slot) -> Any:
        """``training_step`` of the slot; what it logs belongs to that hook."""
        s, fields = self._session, self._fields
        args = (s.batch, slot.batch_idx) if self._takes_index else (s.batch,)
        previous, fields["_current_fx_name"] = fields["_current_fx_name"], "training_step"
        try:
            if self._sharded is None and self.autocast is None and not self._splits_loss:
                return s.task.training_step(*args)
            return self.compute("training_step", *args)
        finally:
            fields["_current_fx_name"] = previous

    def compute(self, method: str, *args: Any) -> Any:
        """A step method of the user's module, through the sharding where there is one."""
        s, sharded = self._session, self._sharded
        with self._around_loss(), self.autocast() if self.autocast is not None else nullcontext():
            if sharded is None:
                return getattr(s.task, method)(*args)
            if sharded.knows(method):
                return sharded(method, *args)
            return sharded.learn(method, *args, publish=s.somebody_idles)

    def _around_loss(self) -> AbstractContextManager[None]:
        """What passes run in: of a loss over split classes, and of a part of the tokens."""
        of_classes = self._tensor.context() if self._tensor is not None and self._splits_loss else _NOTHING
        return of_classes if self._context is None else _both(of_classes, self._context.active())

    def _ghost(self, sharded: Sharded) -> Tensor:
        with self.autocast() if self.autocast is not None else nullcontext():
            return sharded.ghost("training_step")

    # ---- forward and backward --------------------------------------------------------------------------------------

    def start(self, num_slots: int) -> None:
        """A global batch of so many slots, on all ranks together, is about to begin."""
        if self._stats is not None:
            self._stats.start(num_slots)

    def slot(
        self,
        work: Work,
        slot: Slot | None,
        output: dict[str, Any],
        before: Tensor | None,
        *,
        is_first: bool,
        is_last: bool,
    ) -> Tensor | None:
        """Forward and backward of one slot; with the last one also the sum over ranks.

        Args:
            slot: None where this rank has none in this turn.
            output: gets what ``on_train_batch_end`` is told.
            before: the loss of the slots before this one; LBFGS comes here several times with the same.
        """
        s, sharded, gradients = self._session, self._sharded, self._gradients
        started = time.perf_counter()
        loss = None if slot is None else self._loss(work, slot, output, before)
        if s.skip_backward:
            return loss
        if is_first:
            zero_grad(s, s.optimizers[0])
        if sharded is not None:
            sharded.last_pass(is_last)
        if loss is not None:
            self._backward(loss, is_last=is_last)
        elif sharded is not None and slot is None:
            torch.autograd.backward(self._ghost(sharded))
            if is_last:
                self._finish()
        if is_last and loss is None and gradients is not None:
            gradients.finish()
        if is_last and self._stats is not None:
            self._stats.finish()
        s.seconds[1] += time.perf_counter() - started
        return loss

    def apart(self, slot: Slot | None, *, factor: float = 1.0) -> None:
        """Forward and backward of one slot, outside of any step and its hooks; its loss is multiplied by ``factor``."""
        sharded, loss = self._sharded, None
        if sharded is not None:
            sharded.last_pass(True)
        if slot is not None:
            loss = self._unpacked(self.forward(slot), slot, {})
        elif sharded is not None:
            loss = self._ghost(sharded)
        if loss is not None:
            with self._around_loss():
                (loss if factor == 1.0 else loss * factor).backward()

    def _loss(self, work: Work, slot: Slot, output: dict[str, Any], before: Tensor | None) -> Tensor | None:
        """The slot's share of the global mean; with LBFGS several times."""
        s, stats = self._session, self._stats
        if stats is not None:
            stats.before(slot.index)
        returned = self.forward(slot)
        if stats is not None:
            stats.after(slot.index)
        if type(returned) is not Tensor:
            returned = self._unpacked(returned, slot, output)
            if returned is None:
                return None
        loss = slot_share(s, work, slot, returned)
        share = loss.detach()
        s.loss = share if before is None else before.double() + share  # the same sum in any order
        if "on_train_batch_end" in self._anyone:
            extra = {key: value for key, value in output.items() if key != "loss"}
            output.clear()
            output |= {"loss": share, **extra}
        return loss

    def _unpacked(self, returned: Any, slot: Slot, output: dict[str, Any]) -> Tensor | None:
        """The loss in what ``training_step`` returned, where that is no plain tensor; the rest goes into ``output``."""
        if isinstance(returned, Mapping):
            if returned.get("loss") is None:
                raise UsageError("training_step returned a dict without 'loss': add it, or return the loss itself")
            output.clear()
            output.update({k: v for k, v in returned.items() if k != "loss"})
            returned = returned["loss"]
        returned = whole(returned)  # over split classes it is a DTensor
        if isinstance(returned, Tensor):
            return returned
        if returned is None:
            if self._session.ranks.world_size > 1:
                raise UnsupportedError(
                    f"training_step returned None for batch {slot.batch_idx}: on several ranks every slot needs a loss;"
                    " return a loss of zero (outputs.sum() * 0)"
                )
            return None
        raise UsageError(
            f"training_step returned a {type(returned).__name__}: return the loss, a dict with 'loss', or None"
        )

    def _backward(self, loss: Tensor, *, is_last: bool) -> None:
        s, gradients = self._session, self._gradients
        if "on_before_backward" in self._anyone:
            self._hooks("on_before_backward", loss)
        if gradients is not None and is_last and "backward" not in self._own:
            gradients.arm()  # user code that calls backward itself may do so twice
        if s.scaler is not None:
            loss = s.scaler.scale(loss)
        with self._around_loss():
            if "backward" in self._own:
                self._hooks("backward", loss)
            else:
                loss.backward()
        if is_last and self._meets:
            started = time.perf_counter()
            if gradients is not None:
                gradients.finish()
            self._finish()
            s.seconds[3] += time.perf_counter() - started
        if "on_after_backward" in self._anyone:
            self._hooks("on_after_backward")

    def _finish(self) -> None:
        """The gradients of a step are there, as FSDP has left them."""
        if self._sharded is not None:
            self._sharded.finish()
        if self._tensor is not None:
            self._tensor.finish(self._session.loss)


def slot_share(session: Session, work: Work, slot: Slot, loss: Tensor) -> Tensor:
    """A slot's mean loss as its share of the global mean."""
    divisor = _divisor(session, work, slot)
    if divisor == math.inf:  # a mean over nothing, which counts nothing
        loss = torch.nan_to_num(loss)
    return loss if divisor == 1.0 else loss / divisor


def _divisor(session: Session, work: Work, slot: Slot) -> float:
    """What a slot's mean loss is divided by, so that the sum over all slots is the global mean.

    Where several ranks have a part of its tokens each, it is this rank's part's, and the sum is over those ranks as well.
    """
    num_parts = session.mesh.shape.cp
    if work.weights is None:
        if session.chosen.by_microbatch:
            return float(session.accumulation * num_parts)
        assert work.num_samples is not None
        return work.num_samples * num_parts / slot.size
    weight = session.part_weight
    if weight is None or num_parts == 1:
        weight = work.weights[slot.index] / num_parts
    total = work.total_weight if work.total_weight is not None else work.num_samples
    assert total is not None
    return total / weight if weight else math.inf


@contextmanager
def _both(first: AbstractContextManager[Any], second: AbstractContextManager[Any]) -> Iterator[None]:
    with first, second:
        yield


def zero_grad(session: Session, optimizer: Optimizer) -> None:
    """Before the first backward pass of a step, with the hooks of those who care."""
    hooks = session.hooks
    if "on_before_zero_grad" in hooks.anyone:
        hooks("on_before_zero_grad", optimizer)
    if "optimizer_zero_grad" in hooks.own:
        hooks("optimizer_zero_grad", session.counters.epoch, session.batch_idx, optimizer)
    else:
        optimizer.zero_grad()
