"""Tensor parallelism: the matrices of a layer cut over the ranks of the ``tp`` axis, by a plan (see ``plans.py``).

Ranks that differ in ``tp`` alone read the same slots with the same random numbers. What the plan does not name is whole
on all of them, computes the same and gets the same gradients. What is whole and works on split activations (a norm of
each head, by the style ``replicated_with_grad_allreduce``) gets a part of its gradient on each rank, and
:meth:`TensorParallel.finish` sums them. A plan that leaves one of these out would train wrongly without a word; the same
method compares losses and gradients over the ranks once, in the first step.

Dropout between the split layers therefore draws the same mask on all ranks, as one rank would. Within a split layer
(attention heads, a sequence cut by ``sequence_parallel``) masks belong to parts that one rank would have seen together:
the numbers there are not those of one rank.

On failure: :class:`~elastictrain.errors.UsageError` naming what differs and the remedy, on every rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import RowwiseParallel, loss_parallel, parallelize_module

from elastictrain.errors import UsageError
from elastictrain.parallel.mesh import Mesh
from elastictrain.parallel.plans import Plan, not_a_multiple
from elastictrain.parallel.shard import IDLE
from elastictrain.state import of_local


class TensorParallel:
    """A module cut over the ``tp`` axis of the mesh: its planned weights are DTensors.

    Args:
        task: weights that have values must be the same on all ranks.
        replaced: called with ``(new, old)`` for each parameter that became another tensor.
        idle: names of modules that are also run without data (:meth:`Sharded.ghost`); their hooks then do nothing.

    Attributes:
        splits_loss: forward and backward passes must run within :meth:`context`.
    """

    def __init__(
        self,
        task: nn.Module,
        plan: Plan,
        *,
        mesh: Mesh,
        replaced: Callable[[Tensor, Tensor], None],
        idle: Collection[str] = (),
    ) -> None:
        assert mesh.device_mesh is not None
        self.splits_loss = plan.splits_loss
        self._task, self._mesh = task, mesh
        self._group = mesh.device_mesh.get_group("tp")
        self._summed_modules = frozenset(plan.summed)
        self._parts: list[Any] | None = None  # the trainable DTensors, once somebody asked
        self._summed: dict[int, Tensor] = {}  # … and by their ids the trainable ones of which each rank has a part
        before = {
            (path, name): tensor
            for path, module in task.named_modules()
            for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        }
        for path, style in plan.styles.items():
            module = task.get_submodule(path)
            with _switched(module) if path in idle else contextlib.nullcontext():
                # Every rank has all values, or none: nothing has to be sent.
                parallelize_module(module, mesh.device_mesh["tp"], style, src_data_rank=None)
                if isinstance(style, RowwiseParallel) and isinstance(style.output_layouts[0], Shard):
                    even = _even(path, style.output_layouts[0].dim, mesh.shape.tp)
                    module.register_forward_pre_hook(even, prepend=True)
        self._restore(before, replaced)

    def _restore(self, before: Mapping[tuple[str, str], Tensor], replaced: Callable[[Tensor, Tensor], None]) -> None:
        """What cutting undoes without a word: tied weights, frozen weights, marks that user code left on them."""
        new_of: dict[int, Tensor] = {}
        for (path, name), old in before.items():
            module = self._task.get_submodule(path)
            is_now: Tensor = getattr(module, name)
            new = new_of.setdefault(id(old), is_now)
            if new is not is_now:
                setattr(module, name, new)
            elif new is not old:
                new.requires_grad_(old.requires_grad)
                new.__dict__.update(old.__dict__)
                replaced(new, old)

    def context(self) -> contextlib.AbstractContextManager[None]:
        """Around a forward or a backward pass; not to be nested."""
        return loss_parallel() if self.splits_loss else contextlib.nullcontext()

    @torch.no_grad()
    def finish(self, loss: Tensor | None, parameters: Iterable[Tensor] | None = None) -> None:
        """The step's last backward pass is done: put gradients together that are sums over ranks. A collective.

        Args:
            parameters: whose gradients are done; None: all.

        Raises:
            UsageError: in the first step: what must be equal on the ranks of the axis is not.
        """
        if self._parts is None:
            self._find()
            self._check(loss)
        assert self._parts is not None
        done = None if parameters is None else {id(parameter) for parameter in parameters}
        sums: dict[torch.dtype, list[tuple[Any, Tensor]]] = {}
        for parameter in self._parts:
            grad = parameter.grad
            if grad is None or grad.placements == parameter.placements:
                continue
            if parameter.placements == (Replicate(),) and grad.placements == (Partial(),):
                sums.setdefault(grad.dtype, []).append((parameter, grad.to_local()))
            else:
                parameter.grad = grad.redistribute(placements=parameter.placements)
        for key, parameter in self._summed.items():
            if parameter.grad is not None and (done is None or key in done):
                grad = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
                sums.setdefault(grad.dtype, []).append((parameter, grad))
        for together in sums.values():
            flat = torch.cat([local.reshape(-1) for _, local in together])
            dist.all_reduce(flat, group=self._group)
            for (parameter, local), part in zip(together, flat.split([g.numel() for _, g in together]), strict=True):
                if id(parameter) in self._summed:
                    local.copy_(part.view(local.shape))
                else:
                    mesh, whole = parameter.grad.device_mesh, part.view(local.shape)
                    parameter.grad = DTensor.from_local(whole, mesh, parameter.placements, run_check=False)

    def _find(self) -> None:
        """Which gradients have to be put together; the parameters are now those that train."""
        self._parts = [p for p in self._task.parameters() if isinstance(p, DTensor) and p.requires_grad]
        for path, module in self._task.named_modules():
            if path in self._summed_modules:
                whole = [p for p in module.parameters() if p.requires_grad and not _is_cut(p)]
                self._summed |= {id(p): p for p in whole}

    def _check(self, loss: Tensor | None) -> None:
        names, values = ["the loss"], [torch.zeros(()) if loss is None else loss]
        for name, parameter in self._task.named_parameters():
            grad = parameter.grad
            if grad is None or _is_cut(parameter) or id(parameter) in self._summed:
                continue
            names.append(name)
            values.append(torch.linalg.vector_norm(grad.to_local() if isinstance(grad, DTensor) else grad))
        mine = torch.stack([value.detach().float().reshape(()).to(self._mesh.ranks.device) for value in values])
        least, most = mine.clone(), mine
        dist.all_reduce(least, op=dist.ReduceOp.MIN, group=self._group)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self._group)
        differs = (most - least) > 1e-3 * most.abs() + 1e-12
        if bool(differs.any()):
            i = int(differs.nonzero()[0])
            where = f"{least[i].item():.6g} to {most[i].item():.6g}"
            if i == 0:
                raise UsageError(
                    f"the loss differs over the ranks of mesh axis tp ({where}): the tensor-parallel plan leaves"
                    " activations split; let the last layer put them together (rowwise, colwise_gather_output)"
                )
            raise UsageError(
                f"the gradient of {names[i]} differs over the ranks of mesh axis tp (norm {where}): it is whole on every"
                " rank and works on split activations; give its module a style in the tensor-parallel plan"
                " (sequence_parallel for a norm, replicated_with_grad_allreduce for a norm of each head), or leave its"
                " neighbours out"
            )


def _is_cut(parameter: Tensor) -> bool:
    """Is it a DTensor of tensor parallelism, not of FSDP alone?"""
    return isinstance(parameter, DTensor) and "tp" in (parameter.device_mesh.mesh_dim_names or ())


def empty(like: DTensor) -> DTensor:
    """Without values, on the device of its mesh, laid out as ``like``."""
    local = torch.empty_like(like.to_local(), device=like.device_mesh.device_type)
    return of_local(local, like)


def cut(value: Tensor, like: DTensor) -> DTensor:
    """This rank's part of a whole tensor, laid out as ``like``, in memory of its own."""
    mesh, local = like.device_mesh, value
    for axis, placement in enumerate(like.placements):
        if isinstance(placement, Shard):
            size = local.shape[placement.dim]
            part = -(-size // mesh.size(axis))
            start = min(size, part * mesh.get_local_rank(axis))
            local = local.narrow(placement.dim, start, min(part, size - start))
        else:
            assert isinstance(placement, Replicate), placement
    return of_local(local.to(mesh.device_type, copy=True), like)


def whole(value: Any) -> Any:
    """A DTensor as the ordinary tensor that it stands for, with its gradient; anything else as it is."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def _even(path: str, dim: int, tp: int) -> Callable[[nn.Module, Any], None]:
    def check(module: nn.Module, inputs: Any) -> None:
        if inputs[0].shape[dim] % tp:
            raise UsageError(
                f"the output of {path} is split along dim {dim}, where the batch has"
                f" {inputs[0].shape[dim]}, {not_a_multiple(inputs[0].shape[dim], tp)}, or a plan without sequence"
                " parallelism"
            )

    return check


class _switched:
    """Within, hooks that are registered on the module do nothing while it is idle."""

    def __init__(self, module: nn.Module) -> None:
        self._fields = module.__dict__
        self._module = module

    def __enter__(self) -> None:
        for register in ("register_forward_pre_hook", "register_forward_hook"):
            self._fields[register] = self._through(getattr(self._module, register))

    @staticmethod
    def _through(register: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(hook: Callable[..., Any], **options: Any) -> Any:
            return register(lambda module, *args: None if IDLE in module.__dict__ else hook(module, *args), **options)

        return wrapped

    def __exit__(self, *exc: object) -> None:
        for register in ("register_forward_pre_hook", "register_forward_hook"):
            del self._fields[register]
