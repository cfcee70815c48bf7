"""One training step: what this rank does with a global batch.

A step is one global batch: this rank's slots one after another, forward and backward (:mod:`elastictrain.passes`, or all
of them through a pipeline: :mod:`elastictrain.piping`), then one reduction, clipping and the optimizer; with manual
optimisation the user's code is the step (:mod:`elastictrain.manual`). Hooks run in Lightning's order. Nothing here asks a
device for a value, except on log steps.

On failure: any exception leaves the step half done. The position has not moved (it moves in ``commit``, after the
optimizer), so that whoever restores the last checkpoint uses exactly the samples that come after it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor
from torch.optim import Optimizer

from elastictrain.comparing import compare_with_eager, compare_with_whole
from elastictrain.data.randomness import seed_slot
from elastictrain.data.slots import Slot, Work, mix
from elastictrain.errors import UnsupportedError, UsageError
from elastictrain.manual import ManualStep
from elastictrain.parallel import locally
from elastictrain.parallel.scaling import HeldGradients
from elastictrain.passes import Passes
from elastictrain.piping import PipedStep
from elastictrain.schedules import Schedules
from elastictrain.session import Session

BATCH_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")

Closure = Callable[[], Tensor | None]  # forward and backward of what a step is made of; may run several times


class StepRunner:
    """Runs global batches on this rank.

    Call :meth:`bind` once the session's hooks and model are there. What a step looks at every time is looked up there,
    once: on a small model the look-ups of a step cost as much as its arithmetic.

    Attributes:
        passes: forward and backward of a slot, and the user's other step methods; from :meth:`bind` on.
        manual: what manual optimisation calls into.
        schedules: steps the learning rate schedulers.
    """

    passes: Passes

    def __init__(self, session: Session) -> None:
        self._session = session
        self.schedules = Schedules(session)
        self.manual = ManualStep(session)

    def bind(self) -> None:
        s = self._session
        self._hooks, self._own, self._anyone = s.hooks, s.hooks.own, s.hooks.anyone
        self._is_sharded = s.built.sharded is not None
        self._dp_rank, self._dp_size = s.mesh.dp_rank, s.mesh.dp_size
        self._is_automatic = s.task.automatic_optimization
        self._seed, self._device = s.settings.seed, s.device
        self._moves = s.device.type != "cpu" or bool(s.datamodule_hooks) or any(n in self._own for n in BATCH_HOOKS)
        self._context = s.built.context
        self._is_compared = s.plan.compilation is None and self._context is None
        self.passes = Passes(s)
        self._piped: PipedStep | None = None
        if s.built.pipeline is not None:
            self._piped = PipedStep(s, s.built.pipeline, self.passes.autocast)
        # Who runs the closure: we, where nobody can tell the difference; else the optimizer, as Lightning has it.
        self._runs_closure = "optimizer_step" not in self._own and s.scaler is None and len(s.optimizers) == 1
        self._runs_closure &= all(type(o).__module__.startswith("torch.optim.") for o in s.optimizers)
        self._runs_closure &= not any(isinstance(o, torch.optim.LBFGS) for o in s.optimizers)

    # ---- a step ----------------------------------------------------------------------------------------------------

    def run(self, work: Work) -> bool:
        """One global batch. False where ``on_train_batch_start`` asks to skip the rest of the epoch."""
        s = self._session
        s.loss = s.grad_norm = None
        s.is_last_step, s.next_batch = work.is_last, work.first_batch_idx + work.num_slots
        s.somebody_idles = work.somebody_idles or work.num_slots < self._dp_size
        if self._piped is not None:
            self._through_pipeline(work, self._piped)
            return True
        return self._automatic(work) if self._is_automatic else self._by_hand(work)

    def _automatic(self, work: Work) -> bool:
        """Every slot of this rank forward and backward, the last one within the optimizer's step."""
        s, passes = self._session, self.passes
        # A sharded model needs every rank in every turn; else a rank has as many turns as slots.
        ahead = 0 if self._is_sharded else self._dp_rank
        last = max(0, -(-(work.num_slots - ahead) // self._dp_size) - 1)
        passes.start(work.num_slots)
        for turn in range(last + 1):
            slot = self._next(work.slots)
            if slot is not None and self._begin(slot) == -1:
                return False
            if not self._is_compared and not s.skip_backward:
                self._compare(slot)
            output: dict[str, Any] = {}
            compute = partial(passes.slot, work, slot, output, s.loss, is_first=turn == 0, is_last=turn == last)
            if turn < last or s.skip_backward:
                compute()
            else:
                self._step(compute)
            if turn == last:
                self._count_step(work)
            if slot is not None and "on_train_batch_end" in self._anyone:
                self._hooks("on_train_batch_end", output, s.batch, slot.batch_idx)
        return True

    def _through_pipeline(self, work: Work, piped: PipedStep) -> None:
        """All slots of this rank as the microbatches of a schedule, within the optimizer's step."""
        s = self._session
        piped.begin()
        while (slot := self._next(work.slots)) is not None:
            self._begin(slot)
            piped.add(slot)
        if not self._is_compared:
            self._is_compared = True
            compare_with_eager(s, partial(piped.compute, work))
        self._step(partial(piped.step, work))
        self._count_step(work)
        if "on_train_batch_end" in self._anyone:
            for slot, batch, output in piped.slots:
                s.batch, s.batch_idx, s.batch_size = batch, slot.batch_idx, None
                self._hooks("on_train_batch_end", output, batch, slot.batch_idx)

    def _by_hand(self, work: Work) -> bool:
        """The user's own code is the step; this rank's share of the global batch is its batch."""
        self._session.is_whole = False  # it may step an optimizer at any time
        slot = self.manual.check(work, self._next(work.slots))
        if self._begin(slot) == -1:
            return False
        self.manual.run(work, slot, self.passes)
        return True

    def _next(self, slots: Iterator[Slot]) -> Slot | None:
        started = time.perf_counter()
        slot = next(slots, None)
        self._session.seconds[0] += time.perf_counter() - started
        self._session.has_begun = True  # also without a batch: a sharded module is passed through in any case
        return slot if slot is None or slot.size else None

    def _begin(self, slot: Slot) -> Any:
        """The slot's batch on the device, its random numbers, the hooks before it."""
        s = self._session
        s.batch_idx, s.batch_size, s.in_batch = slot.batch_idx, None, True
        batch = self.part(slot.batch)
        if self._context is not None:
            s.part_weight = getattr(s.task, "loss_weight", lambda batch: None)(batch)
        s.batch = self.to_device(batch) if self._moves else batch
        if self._context is not None:  # ranks draw other numbers for other tokens
            seed_slot(mix(mix(self._seed, s.counters.step, slot.index), self._context.rank), self._device)
        elif not slot.is_seeded or self._device.type != "cpu":
            seed_slot(mix(self._seed, s.counters.step, slot.index), self._device)
        if "on_train_batch_start" not in self._anyone:
            return None
        answer = self._hooks("on_train_batch_start", s.batch, slot.batch_idx)
        if answer == -1 and s.ranks.world_size > 1:
            raise UnsupportedError(
                "on_train_batch_start returned -1 (skip the epoch): each rank sees other batches, so they cannot agree;"
                " set self.trainer.should_stop instead, or run on one rank"
            )
        return answer

    def _count_step(self, work: Work) -> None:
        s = self._session
        s.counters.global_step += 1
        if s.schedulers:
            self.schedules.step("step", s.next_batch)
            if work.is_last:
                self.schedules.step("epoch", s.counters.epoch + 1)

    def _compare(self, slot: Slot | None) -> None:
        """Compiled blocks against eager ones, or parts against the whole, on the first slot of this rank."""
        self._is_compared = True
        if self._context is None:
            compare_with_eager(self._session, partial(self.passes.apart, slot))
        else:
            compare_with_whole(self._session, self._context, self.passes, slot, to_device=self.to_device)

    # ---- the optimizer ---------------------------------------------------------------------------------------------

    def _step(self, compute: Closure) -> None:
        """The last slot, which is ``compute``, and the optimizer's step with the gradients of all of them."""
        s = self._session
        started, computing = time.perf_counter(), s.seconds[1]
        optimizer = s.optimizers[0]
        if self._runs_closure:
            compute()
            self._after_closure(optimizer)
            locally.step(optimizer)
        else:
            has_run = False

            def closure() -> Tensor | None:
                nonlocal has_run
                has_run = True
                with torch.enable_grad():  # there are optimizers that call it without
                    return compute()

            if "optimizer_step" in self._own:
                self._hooks("optimizer_step", s.counters.epoch, s.batch_idx, s.wrapped_optimizers[0], closure)
            else:
                self.optimizer_step(optimizer, closure)
            if not has_run:
                raise UsageError(
                    f"{type(s.task).__name__}.optimizer_step() did not run the closure, which is the training step: call"
                    " optimizer.step(closure=optimizer_closure), or optimizer_closure() where the optimizer should not step"
                )
        s.seconds[2] += time.perf_counter() - started - (s.seconds[1] - computing)

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Step with the gradients that ``closure`` computes; also what ``self.optimizers()[i].step()`` ends in."""
        scaler = self._session.scaler
        if scaler is None:

            def wrapped() -> Any:
                result = closure()
                self._sum_over_ranks(optimizer)
                self._after_closure(optimizer)
                return result

            return optimizer.step(wrapped, **kwargs)
        result = closure()
        self._sum_over_ranks(optimizer)  # before the scaler looks for overflows, so that all ranks see the same
        if all(p.grad is None for group in optimizer.param_groups for p in group["params"]):
            self._after_closure(optimizer)  # training_step gave no loss; a scaler will not step without gradients
            return result
        held: Any = optimizer
        if self._session.built.tensor is not None:
            held = HeldGradients(optimizer, self._session.ranks)
            held.agree()
        scaler.unscale_(held)
        self._after_closure(optimizer)
        result = scaler.step(held, **kwargs)
        scaler.update()
        return result

    def _sum_over_ranks(self, optimizer: Optimizer) -> None:
        if not self._is_automatic:
            self.manual.sum_over_ranks(optimizer)

    def _after_closure(self, optimizer: Optimizer) -> None:
        s = self._session
        s.is_whole = False  # until the boundary
        if "on_before_optimizer_step" in self._anyone:
            self._hooks("on_before_optimizer_step", optimizer)
        if not self._is_automatic:
            return
        value, algorithm = s.plan.clipping
        if "configure_gradient_clipping" in self._own:
            options = {"gradient_clip_val": value, "gradient_clip_algorithm": s.view.gradient_clip_algorithm}
            self._hooks("configure_gradient_clipping", optimizer, **options)
        elif value is not None:
            self.clip(optimizer, value, algorithm)

    def clip(self, optimizer: Optimizer, value: float = 0.0, algorithm: Any = "norm") -> None:
        """Clip the gradients of an optimizer's parameters; the norm is over the whole mesh."""
        if value is None or value <= 0:
            return
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if str(getattr(algorithm, "value", algorithm)) == "value":
            torch.nn.utils.clip_grad_value_(parameters, value)
        else:
            self._session.grad_norm = self._session.built.clip_grad_norm_(parameters, value)

    # ---- batches ---------------------------------------------------------------------------------------------------

    def part(self, batch: Any) -> Any:
        """What this rank has of a batch that is still on the CPU; all of it where no ranks share the tokens."""
        return batch if self._context is None else self._context.part(batch)

    def to_device(self, batch: Any, dataloader_idx: int = 0) -> Any:
        """A batch on the device, by the hooks of the datamodule or the module where they have any."""
        s = self._session
        batch = self._transfer("on_before_batch_transfer", batch, dataloader_idx)
        moved = self._transfer("transfer_batch_to_device", batch, s.device, dataloader_idx)
        if moved is batch and s.device.type != "cpu":
            moved = move_data_to_device(batch, s.device)
        return self._transfer("on_after_batch_transfer", moved, dataloader_idx)

    def _transfer(self, name: str, batch: Any, *args: Any) -> Any:
        s = self._session
        if s.datamodule is not None and name in s.datamodule_hooks:
            return getattr(s.datamodule, name)(batch, *args)
        return self._hooks(name, batch, *args) if name in self._own else batch
