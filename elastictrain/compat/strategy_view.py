"""``self.trainer.strategy`` and ``self.trainer.precision_plugin``, as far as LightningModule's own methods use them.

On failure: what is not here is an :class:`UnsupportedAttribute` with the remedy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from lightning.fabric.plugins.precision import Precision as FabricPrecision
from torch import Tensor

from elastictrain.compat.lightning import LightningModule
from elastictrain.errors import UnsupportedError


class UnsupportedAttribute(UnsupportedError, AttributeError):
    """An attribute of ``self.trainer`` that this trainer does not have; an AttributeError, so that hasattr() works."""


class Strategy:
    """``trainer.strategy``: what LightningModule's own methods call, and the exchanges that user code may make."""

    def __init__(self, view: Any, backward: Callable[..., None], step: Callable[..., Any]) -> None:
        self._view = view
        self.backward = backward
        self.optimizer_step = step
        self.handles_gradient_accumulation = False

    @property
    def _lightning_optimizers(self) -> list[Any]:
        return list(self._view._session.wrapped_optimizers)

    @property
    def optimizers(self) -> list[Any]:
        found: list[Any] = self._view.optimizers
        return found

    @property
    def root_device(self) -> torch.device:
        device: torch.device = self._view._session.device
        return device

    @property
    def lightning_module(self) -> LightningModule:
        module: LightningModule = self._view.lightning_module
        return module

    def barrier(self, name: str | None = None) -> None:
        self._view._session.ranks.barrier()

    def broadcast(self, value: Any, src: int = 0) -> Any:
        return self._view._session.ranks.gather(value)[src]

    def reduce(self, tensor: Any, group: Any = None, reduce_op: str | None = "mean") -> Any:
        mesh = self._view._session.mesh
        if mesh.data_size == 1 or not isinstance(tensor, Tensor):
            return tensor
        dist.all_reduce(tensor, group=mesh.data_group)
        return tensor / mesh.data_size if str(reduce_op).lower() in ("mean", "avg", "none") else tensor

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        answers = self._view._session.ranks.gather(bool(decision))
        return bool((min if all else max)(answers))

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        mesh = self._view._session.mesh
        if mesh.data_size == 1:
            return tensor
        if sync_grads:
            from torch.distributed.nn.functional import all_gather

            return torch.stack(all_gather(tensor.contiguous(), group=mesh.data_group))
        parts = [torch.empty_like(tensor) for _ in range(mesh.data_size)]
        dist.all_gather(parts, tensor.contiguous(), group=mesh.data_group)
        return torch.stack(parts)

    def __getattr__(self, name: str) -> NoReturn:
        raise UnsupportedAttribute(
            f"self.trainer.strategy.{name}: there is no Lightning strategy here; the mesh lays out the model (--mesh)"
        )


class Precision(FabricPrecision):
    """``trainer.precision_plugin``: only clipping goes through it."""

    def __init__(self, clip: Callable[..., None]) -> None:
        self.clip_gradients = clip
