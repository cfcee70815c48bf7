"""Buffers that training changes, kept equal on all ranks and independent of how many there are.

BatchNorm's running statistics are a moving average over microbatches in order: ``r ← (1-m)·r + m·x`` for slot after slot.
A rank sees only its own slots. But the average is linear in every ``x``, so each rank sums its slots' parts with the
weights they have in the whole sequence, and one small reduction per step gives every rank what one rank would have got
(up to rounding). Microbatch statistics themselves stay those of the slot.

Any other buffer that user code changes cannot be merged without knowing what it means: before a validation or a
checkpoint all ranks take rank 0's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from elastictrain.parallel.mesh import Mesh

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


@dataclass
class _Average:
    norm: Any  # a BatchNorm layer
    start: list[Tensor]  # running mean and variance when the step began
    before: list[Tensor]  # … and before the slot
    total: list[Tensor]  # this rank's weighted parts
    tracked: Tensor | None = None  # batches counted when the step began
    num_before: int = 0  # the same as a number, where the average is over all batches (momentum None)
    num_calls: int = 0  # forward passes in training mode within the current slot
    num_total: int = 0  # … within this rank's slots of the step


class RunningStats:
    """The running statistics of all BatchNorm layers of a module, over the slots of a step.

    Call :meth:`start` before the first slot, :meth:`before` and :meth:`after` around each slot's forward pass, and
    :meth:`finish` on every rank when the step's slots are done. A layer may run several times in a slot, as often in
    every slot. False where there is nothing to do: no such layer, or one data-parallel rank.
    """

    def __init__(self, module: nn.Module, mesh: Mesh) -> None:
        norms = [m for m in module.modules() if isinstance(m, NORMS) and m.running_mean is not None]
        self._mesh = mesh
        self._averages = [_Average(norm, [], [], []) for norm in norms] if mesh.dp_size > 1 else []
        self._num_slots = 0
        self._hooks = [a.norm.register_forward_pre_hook(self._counter(a)) for a in self._averages]

    @staticmethod
    def _counter(average: _Average) -> Any:
        def count(norm: nn.Module, inputs: Any) -> None:
            average.num_calls += norm.training

        return count

    def __bool__(self) -> bool:
        return bool(self._averages)

    @torch.no_grad()
    def start(self, num_slots: int) -> None:
        self._num_slots = num_slots
        for a in self._averages:
            a.start = [t.clone() for t in _stats(a.norm)]
            a.total = [torch.zeros_like(t) for t in a.start]
            tracked = a.norm.num_batches_tracked
            a.tracked = tracked.clone() if isinstance(tracked, Tensor) else None
            a.num_before = int(tracked) if isinstance(tracked, Tensor) and a.norm.momentum is None else 0
            a.num_total = 0

    @torch.no_grad()
    def before(self, slot: int) -> None:
        for a in self._averages:
            if a.norm.momentum is None and isinstance(a.norm.num_batches_tracked, Tensor):
                a.norm.num_batches_tracked.fill_(a.num_before + slot)  # a batch's weight is one over their number
            a.before = [t.clone() for t in _stats(a.norm)]
            a.num_calls = 0

    @torch.no_grad()
    def after(self, slot: int) -> None:
        for a in self._averages:
            keep, later = self._kept(a, slot, slot + 1), self._kept(a, slot + 1, self._num_slots)
            for total, now, then in zip(a.total, _stats(a.norm), a.before, strict=True):
                total.add_(now - keep * then, alpha=later)
            a.num_total += a.num_calls

    @torch.no_grad()
    def finish(self) -> None:
        """A collective: one reduction of all statistics."""
        parts = [
            [*(t.reshape(-1).double() for t in a.total), a.start[0].new_tensor([a.num_total]).double()]
            for a in self._averages
        ]
        flat = torch.cat([part for parts_of_one in parts for part in parts_of_one])
        dist.all_reduce(flat, group=self._mesh.data_group)
        offset = 0
        for a in self._averages:
            sums = []
            for running in _stats(a.norm):
                sums.append(flat[offset : offset + running.numel()].view_as(running))
                offset += running.numel()
            num_calls = flat[offset]
            offset += 1
            if a.norm.momentum is None:
                kept = a.num_before / (a.num_before + num_calls)
            else:
                kept = torch.pow(1.0 - a.norm.momentum, num_calls)
            for running, start, part in zip(_stats(a.norm), a.start, sums, strict=True):
                running.copy_(torch.where(num_calls > 0, kept * start.double() + part, start.double()))
            if a.tracked is not None:
                a.norm.num_batches_tracked.copy_(a.tracked + num_calls.long())

    def _kept(self, a: _Average, start: int, stop: int) -> float:
        """What is left of the average after the slots ``[start, stop)``."""
        if a.num_calls == 0:
            return 1.0
        if a.norm.momentum is None:
            return (a.num_before + start) / (a.num_before + stop) if a.num_before + stop else 1.0
        return float((1.0 - a.norm.momentum) ** (a.num_calls * (stop - start)))

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


def _stats(norm: Any) -> list[Tensor]:
    mean, var = norm.running_mean, norm.running_var
    assert isinstance(mean, Tensor) and isinstance(var, Tensor)
    return [mean, var]


@torch.no_grad()
def agree_on_buffers(module: nn.Module, mesh: Mesh) -> None:
    """Every rank takes the first one's buffers, within its pipeline stage; a collective."""
    for buffer in module.buffers():
        mesh.broadcast_(buffer.to_local() if isinstance(buffer, DTensor) else buffer)
