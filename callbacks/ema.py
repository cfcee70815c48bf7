"""Exponential moving averages of the weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from elastictrain.callback import Callback, RunInfo, StepInfo, ValidationInfo
from elastictrain.errors import UsageError


class EMA(Callback):
    """After each step, ``average = decay * average + (1 - decay) * weight`` for every trainable weight.

    Each rank averages the part of a weight that it holds, in place and without waiting for anyone. Averages are laid
    out as their weights are; those of half-precision weights are kept in fp32, in half precision they would never move.
    They are ``ema.{name}`` in the state, so any layout loads them. A weight that the state does not have (the callback
    was added to a run in progress, or a weight was unfrozen) starts at its present value.

    Args:
        decay: kept from one step to the next, whatever ``every`` is.
        every: steps between two updates; each then keeps ``decay ** every``.
        use_for_validation: validate with the averages; training goes on with the weights themselves.

    Raises:
        UsageError: ``decay`` is not within 0 and 1, or ``every`` is not at least 1.
    """

    state_prefix = "ema"

    def __init__(self, *, decay: float = 0.999, every: int = 1, use_for_validation: bool = True) -> None:
        if not 0 <= decay < 1:
            raise UsageError(f"EMA(decay={decay!r}) must be at least 0 and below 1, such as 0.999")
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise UsageError(f"EMA(every={every!r}) must be a whole number of steps, at least 1")
        self.decay = decay
        self.every = every
        self.averages: dict[str, Tensor] = {}  # by name of the weight; DTensors where it is one
        self._weights: dict[str, Tensor] = {}
        self._loaded: Mapping[str, Any] = {}
        self._use_for_validation = use_for_validation
        self._applied = contextlib.ExitStack()
        self._update = get_ema_multi_avg_fn(decay**every)

    @torch.no_grad()
    def on_generation_start(self, info: RunInfo) -> None:
        self._weights = {
            name: weight
            for name, weight in info.task.named_parameters()
            if weight.requires_grad and weight.is_floating_point()
        }
        self.averages = {}
        for name, weight in self._weights.items():
            dtype = torch.promote_types(weight.dtype, torch.float32)
            loaded = self._loaded.get(name)
            start = weight.detach().clone() if loaded is None else loaded.to(weight.device)
            self.averages[name] = start.to(dtype)
        self._loaded = {}

    @torch.no_grad()
    def on_step_end(self, info: StepInfo) -> None:
        if info.step % self.every == 0 and self._weights:
            averages = [_local(average) for average in self.averages.values()]
            weights = [
                _local(weight).to(average.dtype)
                for weight, average in zip(self._weights.values(), averages, strict=True)
            ]
            self._update(averages, weights, None)

    def on_validation_start(self, info: RunInfo) -> None:
        if self._use_for_validation:
            self._applied.enter_context(self.applied())

    def on_validation_end(self, info: ValidationInfo) -> None:
        self._applied.close()

    def on_exception(self, error: BaseException) -> None:
        self._applied.close()

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Within this context the model has the averaged weights; afterwards its own again, to the bit."""
        pairs = [(_local(weight), _local(self.averages[name])) for name, weight in self._weights.items()]
        with torch.no_grad():
            kept = [weight.clone() for weight, _ in pairs]
            for weight, average in pairs:
                weight.copy_(average)
        try:
            yield
        finally:
            with torch.no_grad():
                for (weight, _), own in zip(pairs, kept, strict=True):
                    weight.copy_(own)

    def state_dict(self) -> Mapping[str, Any]:
        return dict(self.averages)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take averages laid out as the weights are; they are kept, not copied."""
        self._loaded = dict(state)


def _local(tensor: Tensor) -> Tensor:
    """The part on this rank: the same memory, no communication."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
