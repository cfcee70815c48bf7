"""Gradients of a replicated model: summed over ranks, in buckets, while the last backward pass is still running.

Every rank may have computed another number of slots, or none; only the sum over ranks has to be right, so one reduction
per step is enough. Parameters stay plain tensors, so that any optimizer and any user code works on them.

Buckets are filled in the order in which gradients usually become ready (the reverse of the model's) and sent in that
fixed order, as DistributedDataParallel does (Li et al. 2020, "PyTorch Distributed"). With each gradient goes a flag, so
that a parameter that one rank did not use gets the others' gradient, and one that nobody used stays without.

On failure: a peer that dies makes :meth:`GradientSum.finish` raise; gradients are then half summed and must be dropped.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class _Bucket:
    def __init__(self, parameters: list[Tensor]) -> None:
        self.parameters = parameters
        self.waiting: set[int] = set()
        self.flat: Tensor | None = None
        self.work: dist.Work | None = None

    def send(self) -> None:
        """Pack gradients and their flags, and start the sum."""
        like = self.parameters[0]
        flags = torch.tensor([float(p.grad is not None) for p in self.parameters], dtype=like.dtype, device=like.device)
        parts = [(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in self.parameters]
        self.flat = torch.cat([*parts, flags])
        self.work = dist.all_reduce(self.flat, async_op=True)

    def receive(self) -> None:
        """Wait for the sum and give each parameter its part."""
        assert self.work is not None and self.flat is not None
        self.work.wait()
        used = self.flat[-len(self.parameters) :]
        offset = 0
        for i, parameter in enumerate(self.parameters):
            part = self.flat[offset : offset + parameter.numel()].view_as(parameter)
            offset += parameter.numel()
            if parameter.grad is not None:
                parameter.grad.copy_(part)
            elif used[i] > 0:  # a sync, in the rare case that another rank used what this one did not
                parameter.grad = part.clone()
        self.work = self.flat = None


class GradientSum:
    """Sums ``.grad`` of parameters over all ranks of the default group.

    Args:
        parameters: dense parameters on one device; those that need no gradient are left out.
        bucket_bytes: size of one reduction.

    Attributes:
        is_under_way: sums of the running step may have been sent, and are not all there yet.
    """

    def __init__(self, parameters: Iterable[Tensor], *, bucket_bytes: int = 25 << 20) -> None:
        self._buckets: list[_Bucket] = []
        self._bucket_of: dict[int, _Bucket] = {}
        self._next = 0
        self._armed = False
        self.is_under_way = False
        self._hooks: list[Any] = []
        unique = {id(p): p for p in parameters if p.requires_grad}
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for parameter in reversed(list(unique.values())):
            by_dtype.setdefault(parameter.dtype, []).append(parameter)
        for group in by_dtype.values():
            current: list[Tensor] = []
            size = 0
            for parameter in group:
                if current and size + parameter.nbytes > bucket_bytes:
                    self._add(current)
                    current, size = [], 0
                current.append(parameter)
                size += parameter.nbytes
            self._add(current)

    def _add(self, parameters: list[Tensor]) -> None:
        bucket = _Bucket(parameters)
        self._buckets.append(bucket)
        for parameter in parameters:
            self._bucket_of[id(parameter)] = bucket
            self._hooks.append(parameter.register_post_accumulate_grad_hook(self._ready))

    def arm(self) -> None:
        """The next backward pass is this rank's last of the step: send each bucket when it is complete."""
        for bucket in self._buckets:
            bucket.waiting = {id(parameter) for parameter in bucket.parameters}
        self._next = 0
        self._armed = self.is_under_way = True

    def _ready(self, parameter: Tensor) -> None:
        if not self._armed:
            return
        self._bucket_of[id(parameter)].waiting.discard(id(parameter))
        while self._next < len(self._buckets) and not self._buckets[self._next].waiting:
            self._buckets[self._next].send()
            self._next += 1

    def finish(self) -> None:
        """Send what was not sent and wait for everything; every rank calls this once per step."""
        self._armed, self.is_under_way = False, True
        for bucket in self._buckets[self._next :]:
            bucket.send()
        self._next = 0
        for bucket in self._buckets:
            bucket.receive()
        self.is_under_way = False

    def sum_now(self, parameters: Iterable[Tensor]) -> None:
        """Sum the gradients of some parameters only, at once (one optimizer of several, in manual optimisation)."""
        chosen = [p for p in parameters if id(p) in self._bucket_of]
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for parameter in chosen:
            by_dtype.setdefault(parameter.dtype, []).append(parameter)
        for group in by_dtype.values():
            bucket = _Bucket(group)
            bucket.send()
            bucket.receive()

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
