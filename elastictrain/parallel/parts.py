"""A module as a row of parts that a pipeline may deal out, and what each of them weighs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import nn

from elastictrain.parallel.measure import Kept, State
from elastictrain.parallel.memory import Part, Weight
from elastictrain.parallel.roles import Role
from elastictrain.parallel.shard import shard_units
from elastictrain.parallel.units import find_units


def part_names(task: nn.Module) -> list[str]:
    """The units of a pipeline that weigh something."""
    modules = dict(task.named_modules())
    return [n for n in find_units(task) if any(True for _ in (*modules[n].parameters(), *modules[n].buffers()))]


def parts_of(
    task: nn.Module,
    names: Sequence[str],
    found: Mapping[str, Role],
    state: State | None = None,
    kept: Sequence[Kept] | None = None,
) -> Iterator[Part]:
    """The parts with what they weigh.

    Args:
        state: None: two moments of each parameter.
        kept: None: activations are not known.
    """
    units = set(shard_units(task))
    seen: dict[int, str] = {}  # id of a parameter -> its first name
    inside = {id(p) for name in names for p in task.get_submodule(name).parameters()}
    rest = [(name, p) for name, p in task.named_parameters() if id(p) not in inside]
    buffers = {id(b): b for b in task.buffers()}
    for index, name in enumerate(names or [""]):
        own: list[Weight] = []
        tied: dict[int, Weight] = {}
        mine = [(_join(name, n), p) for n, p in task.get_submodule(name).named_parameters(remove_duplicate=False)]
        for full, parameter in [*mine, *(rest if index == 0 and names else [])]:
            weight = _weight(full, parameter, found, state)
            if id(parameter) not in seen:
                seen[id(parameter)] = name
                own.append(weight)
            elif seen[id(parameter)] != name:
                tied[id(parameter)] = weight
        part_buffers = list((task if index == 0 and not names else task.get_submodule(name)).buffers())
        num_bytes = sum(b.numel() * b.element_size() for b in part_buffers if buffers.pop(id(b), None) is not None)
        if index == len(names) - 1:  # of modules that belong to no part
            num_bytes += sum(b.numel() * b.element_size() for b in buffers.values())
        measured = kept[index] if kept is not None else Kept()
        yield Part(
            weights=tuple(own),
            is_unit=name in units,
            tied=tuple(tied.values()),
            buffers=num_bytes,
            saved=measured.saved.frozen(),
            kept=measured.kept.frozen(),
            redone=measured.redone.frozen(),
            sent=measured.sent,
        )


def _weight(name: str, parameter: nn.Parameter, found: Mapping[str, Role], state: State | None) -> Weight:
    owner, _, leaf = name.rpartition(".")
    cut, fixed = 0, 0
    if parameter.requires_grad:
        assumed = (2 * parameter.numel() * parameter.element_size(), 0)
        cut, fixed = assumed if state is None else state.get(name, (0, 0))
    return Weight(
        shape=tuple(parameter.shape),
        itemsize=parameter.element_size(),
        trains=parameter.requires_grad,
        state=cut,
        fixed=fixed,
        tp_dim=found[owner].cuts.get(leaf) if owner in found else None,
    )


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
