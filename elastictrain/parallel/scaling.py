"""fp16's gradient scaler where ranks hold different parts of the gradients.

``torch.amp.GradScaler`` looks for overflows in the gradients of this process, and cannot look into ordinary and distributed
tensors at once. Here it sees what this rank holds, as ordinary tensors on the same memory, and an overflow on any rank is
one on every rank: all skip the step, and their scales stay the same.

On failure: a peer that dies makes the exchange raise.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from elastictrain.parallel.mesh import Ranks


class HeldGradients:
    """An optimizer as a gradient scaler sees it: what this rank holds of its gradients, and its step.

    Args:
        optimizer: its gradients are those of the step, reduced over ranks.
    """

    def __init__(self, optimizer: Optimizer, ranks: Ranks) -> None:
        self._optimizer, self._ranks = optimizer, ranks
        self.param_groups = [{"params": [_held(p) for p in group["params"]]} for group in optimizer.param_groups]

    @torch.no_grad()
    def agree(self) -> None:
        """Every rank sees an overflow where any rank has one; a collective of all ranks. Nothing waits for its answer."""
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        found = [(~gradient.isfinite()).any() for gradient in gradients]
        overflows = torch.stack(found).any().float() if found else torch.zeros((), device=self._ranks.device)
        self._ranks.sum_(overflows)
        for gradient in [gradient for gradient in gradients if gradient.numel()][:1]:
            gradient.view(-1)[0].add_(torch.where(overflows > 0, torch.inf, 0.0))

    def step(self, *args: Any, **kwargs: Any) -> Any:
        return self._optimizer.step(*args, **kwargs)


def _held(parameter: Tensor) -> Tensor:
    local = parameter.detach()
    local = local.to_local() if isinstance(local, DTensor) else local
    gradient = parameter.grad
    if gradient is not None:
        local.grad = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    return local
