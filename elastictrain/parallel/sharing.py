"""Weights that several pipeline stages use: their gradient is the sum over those stages, and they count once.

A weight tied across stages (an embedding that is also the output layer) and a parameter outside of all units are there on
every stage that uses them, equal at the start, and stay equal because every holder takes the same step.

On failure: a peer that dies makes the sums raise; gradients are then half summed and must be dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from elastictrain.parallel.mesh import making_groups
from elastictrain.parallel.units import Cut


@dataclass(frozen=True)
class Names:
    """The names of the whole model, before it was cut.

    Args:
        aliases: every further name of a tied weight, and its first one, by which it is kept.
        state: every name in the model's ``state_dict``, tied ones under their first name only.
        outside: parameters and their first names that belong to no unit.
        stages: for each parameter that several stages hold, by its first name, those stages.
    """

    aliases: dict[str, str]
    state: frozenset[str]
    outside: tuple[str, ...]
    stages: dict[str, tuple[int, ...]]

    def first(self, name: str) -> str:
        """The name under which a weight is kept."""
        return self.aliases.get(name, name)


def whole_names(task: nn.Module, cut: Cut) -> Names:
    """Look at the whole model; before its units are replaced."""
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for name, parameter in task.named_parameters(remove_duplicate=False):
        if first.setdefault(id(parameter), name) != name:
            aliases[name] = first[id(parameter)]
    holders: dict[str, set[int]] = {}
    for unit, unit_name in enumerate(cut.units):
        for parameter in task.get_submodule(unit_name).parameters():
            holders.setdefault(first[id(parameter)], set()).add(cut.stage_of(unit))
    inside = {id(p) for name in cut.units for p in task.get_submodule(name).parameters()}
    outside = tuple(name for name, p in task.named_parameters() if id(p) not in inside)
    stages = {name: tuple(sorted(found)) for name, found in holders.items() if len(found) > 1}
    stages |= {name: tuple(range(cut.num_stages)) for name in outside}
    state = frozenset(aliases.get(name, name) for name in task.state_dict(keep_vars=True))
    return Names(aliases, state, outside, stages)


class Sharing:
    """The shared weights of this rank.

    Args:
        task: cut, its parameters as they are trained.

    Attributes:
        counted_elsewhere: parameters whose gradient another stage counts in a norm over all.
    """

    def __init__(self, task: nn.Module, names: Names, cut: Cut, device_mesh: DeviceMesh) -> None:
        own = device_mesh.get_local_rank("pp")
        here = {names.first(name): p for name, p in task.named_parameters(remove_duplicate=False)}
        self._by_group: list[tuple[list[Tensor], dist.ProcessGroup]] = []
        self.counted_elsewhere: list[Tensor] = []
        members: dict[tuple[int, ...], list[str]] = {}
        for name, stages in sorted(names.stages.items()):
            members.setdefault(tuple(sorted({cut.owners[stage] for stage in stages})), []).append(name)
        for ranks, shared in sorted(members.items()):
            if len(ranks) == 1:
                continue
            group = _group(device_mesh, ranks)
            if group is None or own not in ranks:
                continue
            held = [here[name] for name in shared]
            self._by_group.append(([p for p in held if p.requires_grad], group))
            if own != ranks[0]:
                self.counted_elsewhere += held

    def sum_gradients(self) -> None:
        """Over the stages that hold each of them; a collective of the pipeline's ranks."""
        for parameters, group in self._by_group:
            sum_gradients(parameters, group)


def _group(device_mesh: DeviceMesh, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
    """The group of some pp coordinates of this rank's pipeline; every rank makes every group, in one order."""
    pipelines = device_mesh.mesh.reshape(device_mesh.mesh.shape[0], -1).t().tolist()
    if len(ranks) == len(pipelines[0]):
        return device_mesh.get_group("pp")
    mine: dist.ProcessGroup | None = None
    with making_groups():
        for pipeline in pipelines:
            group = dist.new_group([pipeline[rank] for rank in ranks])
            if dist.get_rank() in pipeline:
                mine = group
    return mine


@torch.no_grad()
def sum_gradients(parameters: Sequence[Tensor], group: dist.ProcessGroup | None) -> None:
    """Sum ``.grad`` over a group; one that some rank lacks becomes the others', one that all lack stays None."""
    by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for parameter in parameters:
        by_kind.setdefault((parameter.dtype, parameter.device), []).append(parameter)
    for (dtype, device), alike in by_kind.items():
        flags = torch.tensor([float(p.grad is not None) for p in alike], dtype=dtype, device=device)
        flat = torch.cat([*(_local_gradient(p).reshape(-1) for p in alike), flags])
        dist.all_reduce(flat, group=group)
        offset, used = 0, flat[-len(alike) :]
        for number, parameter in enumerate(alike):
            if parameter.grad is None and used[number] > 0:  # a sync, where another stage used what this one did not
                parameter.grad = torch.zeros_like(parameter)
            if parameter.grad is not None:
                local = _local_gradient(parameter)
                local.copy_(flat[offset : offset + local.numel()].view_as(local))
            offset += _local(parameter).numel()


def _local_gradient(parameter: Tensor) -> Tensor:
    """This rank's part of the gradient, laid out as the parameter is; zeros where there is none."""
    gradient = parameter.grad
    if gradient is None:
        return torch.zeros_like(_local(parameter))
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
        if gradient.placements != parameter.placements:
            gradient = parameter.grad = gradient.redistribute(placements=parameter.placements)
        return gradient.to_local()
    return gradient


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
