"""The norm of all gradients of a model, however it is laid out, and clipping by it.

Gradients may be plain tensors, DTensors, or a mixture on different meshes: FSDP's on ``dp_shard``, tensor parallelism's on
``dp_shard × tp``, plain ones that every rank has. Each rank takes the norm of what it holds, apart for each set of mesh
axes that a gradient is cut along; the squares are then summed over just those axes, once for each axis. A part that
several ranks hold alike is so counted once. A pipeline's stages add theirs last.

All of it stays on the device, and every rank gets the same number. On failure: a peer that dies makes the sums raise.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from elastictrain.compat.torch import scale_


@torch.no_grad()
def clip_grad_norm_(
    parameters: Iterable[Tensor],
    max_norm: float,
    *,
    stages: dist.ProcessGroup | None = None,
    counted_elsewhere: Collection[Tensor] = (),
) -> Tensor:
    """Scale the gradients of ``parameters`` in place so that their L2 norm is at most ``max_norm``.

    Args:
        stages: the ranks that hold the other stages of a pipeline; a collective of theirs.
        counted_elsewhere: parameters of which another stage counts the gradient (weights tied over stages); theirs are
            scaled and not counted.

    Returns:
        the norm before scaling, a plain tensor; nothing has waited for its value.
    """
    with_grad = [p for p in parameters if p.grad is not None]
    elsewhere = {id(p) for p in counted_elsewhere}
    norm = grad_norm([p.grad for p in with_grad if p.grad is not None and id(p) not in elsewhere], stages=stages)
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    scale_([_held(p.grad) for p in with_grad if p.grad is not None], factor)
    return norm


@torch.no_grad()
def grad_norm(gradients: Iterable[Tensor], *, stages: dist.ProcessGroup | None = None) -> Tensor:
    """L2 norm of all gradients together; a collective of the ranks that share any of them, and of ``stages``."""
    held: dict[tuple[str, ...], list[Tensor]] = {}  # by the names of the groups that a gradient is cut over
    groups: dict[str, dist.ProcessGroup] = {}  # in the order of first use, which is the same on all their ranks
    for gradient in gradients:
        cut: list[dist.ProcessGroup] = []
        if isinstance(gradient, DTensor):
            if any(placement.is_partial() for placement in gradient.placements):
                whole = [Replicate() if placement.is_partial() else placement for placement in gradient.placements]
                gradient = gradient.redistribute(placements=whole)
            mesh = gradient.device_mesh
            axes = [i for i, placement in enumerate(gradient.placements) if not placement.is_replicate()]
            cut = [mesh.get_group(i) for i in axes if mesh.size(i) > 1]
        groups |= {group.group_name: group for group in cut if group.group_name not in groups}
        held.setdefault(tuple(group.group_name for group in cut), []).append(_held(gradient))
    if not groups and stages is None:
        return torch.nn.utils.get_total_norm(held.get((), []))
    squares = {names: torch.nn.utils.get_total_norm(parts).double().square() for names, parts in held.items()}
    for name, group in groups.items():
        over = [names for names in squares if name in names]
        summed = torch.stack([squares[names] for names in over])
        dist.all_reduce(summed, group=group)
        squares.update(zip(over, summed.unbind(), strict=True))
    total = torch.stack(list(squares.values())).sum() if squares else _zero()
    if stages is not None:
        dist.all_reduce(total, group=stages)
    return total.sqrt().float()


def _held(tensor: Tensor) -> Tensor:
    """What this rank holds: the same memory, no communication."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _zero() -> Tensor:
    """For a stage without a gradient."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    return torch.zeros((), dtype=torch.float64, device=device)
