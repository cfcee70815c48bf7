"""Host memory that checkpoints take on one node at most: whole images, as many as each of their users has.

That is right after a restart, when one snapshot of the earlier start is still there; later there is one image less. Not
counted are the images of saves that were under way when their worker was lost, which go with the writer that finishes them.

An image has the bytes of the parameters, buffers and optimizer state that a rank writes; of what replicas
hold alike each writes a part. Nothing here fails: an optimizer that cannot be tried is taken for one with two moments.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from elastictrain.checkpoint.held import MAX_COPIES, MAX_EARLIER, MAX_OWN
from elastictrain.checkpoint.plan import local_tensors

MAX_SAVES = 2  # images of saves: one that is written, and one that is staged meanwhile


@dataclass(frozen=True)
class Footprint:
    """Of one node.

    Args:
        state: bytes of the images of its ranks.
        has_buddy: there are several nodes.
    """

    state: int
    has_buddy: bool

    @property
    def saves(self) -> int:
        return MAX_SAVES * self.state

    @property
    def snapshots(self) -> int:
        """On top of it, with ``snapshot_every``: the node's own."""
        return (MAX_OWN + MAX_EARLIER) * self.state

    @property
    def copies(self) -> int:
        """On top of it: another node's."""
        return (MAX_COPIES + MAX_EARLIER) * self.state if self.has_buddy else 0


def state_bytes(module: nn.Module, optimizers: Iterable[Optimizer]) -> int:
    """Of this rank's parameters, buffers and optimizer state; that which is not there yet as one step would make it."""
    total = _local_bytes([*module.parameters(), *module.buffers()])
    for optimizer in optimizers:
        there = _local_bytes(value for values in optimizer.state.values() for value in _tensors(values))
        trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        total += there or _num_moments(optimizer) * _local_bytes(trained)
    return total


def _local_bytes(tensors: Iterable[Tensor]) -> int:
    local = local_tensors({str(i): tensor for i, tensor in enumerate(tensors)})
    return sum(tensor.numel() * tensor.element_size() for tensor in local.values())


def _tensors(values: object) -> list[Tensor]:
    return [v for v in values.values() if isinstance(v, Tensor)] if isinstance(values, Mapping) else []


def _num_moments(optimizer: Optimizer) -> int:
    """How many values such an optimizer keeps for each that it trains: by a step of another one, on six numbers."""
    tried = torch.zeros(2, 3, requires_grad=True)
    tried.grad = torch.zeros(2, 3)
    try:
        alike = type(optimizer)([tried], **optimizer.defaults)
        with torch.no_grad():
            alike.step()
        return sum(value.shape == tried.shape for value in _tensors(alike.state[tried]))
    except Exception:  # it wants other arguments, a device, or names of parameters
        return 2
