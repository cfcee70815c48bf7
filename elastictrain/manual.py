"""Manual optimisation: the user's ``training_step`` is the step, and this module is what it calls into.

A rank's share of the global batch is one slot. Losses are divided so that the gradients, summed over the ranks when an
optimizer steps, are those of the global mean.

On failure: an exception leaves the step half done, as in automatic optimisation.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from elastictrain.data.slots import Slot, Work
from elastictrain.errors import UnsupportedError, UsageError
from elastictrain.parallel.tensor import whole
from elastictrain.passes import Passes
from elastictrain.session import Session


class ManualStep:
    """This rank's share of one global batch after another, computed by user code."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._divisor = 1.0  # of the loss

    def check(self, work: Work, slot: Slot | None) -> Slot:
        """
        Raises:
            UnsupportedError: this rank has no share.
        """
        if slot is None:
            raise UnsupportedError(
                f"a global batch with samples for {work.num_slots} ranks only, and {self._session.mesh.dp_size} are here:"
                " with manual optimisation every rank needs a share; raise --global-batch-size, or drop_last=True"
            )
        return slot

    def run(self, work: Work, slot: Slot, passes: Passes) -> None:
        """``training_step`` of the slot that has begun, and the hook after it."""
        s = self._session
        self._divisor = 1.0 if work.num_samples is None else work.num_samples / slot.size
        started = time.perf_counter()
        output = _as_dict(passes.forward(slot))
        s.seconds[1] += time.perf_counter() - started
        if isinstance(loss := output.get("loss"), Tensor):
            s.loss = whole(loss.detach()) / self._divisor
        s.hooks("on_train_batch_end", output, s.batch, slot.batch_idx)
        assert next(work.slots, None) is None, "with manual optimisation a rank's share is one slot"

    def backward(self, loss: Tensor, optimizer: Any = None, *args: Any, **kwargs: Any) -> None:
        """``self.manual_backward``: this rank's share of the gradient of the global mean."""
        s = self._session
        s.hooks("on_before_backward", loss)
        if self._divisor != 1.0:
            loss = loss / self._divisor
        if s.loss is None:
            s.loss = whole(loss.detach())
        if s.scaler is not None:
            loss = s.scaler.scale(loss)
        if "backward" in s.hooks.own:
            s.hooks("backward", loss, *args, **kwargs)
        else:
            loss.backward(*args, **kwargs)
        s.hooks("on_after_backward")

    def sum_over_ranks(self, optimizer: Optimizer) -> None:
        """Gradients are summed when an optimizer steps: user code may call backward often."""
        s = self._session
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if s.built.gradients is not None:
            s.built.gradients.sum_now(parameters)
        if s.built.sharded is not None:
            s.built.sharded.finish()
        if s.built.tensor is not None:
            s.built.tensor.finish(s.loss, parameters)


def _as_dict(returned: Any) -> dict[str, Any]:
    """What ``on_train_batch_end`` is told."""
    if isinstance(returned, Tensor):
        return {"loss": returned.detach()}
    if isinstance(returned, Mapping):
        return {k: v.detach() if k == "loss" and isinstance(v, Tensor) else v for k, v in returned.items()}
    if returned is None:
        return {}
    raise UsageError(
        f"training_step returned a {type(returned).__name__}: with manual optimisation return None, a tensor or a dict"
    )
