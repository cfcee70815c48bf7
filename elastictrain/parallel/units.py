"""Where a model may be cut for a pipeline, and where it is.

A model is a row of *units*, modules that its ``forward`` calls one after another, each on what the one before returned.
Code of ``forward`` between two units belongs to the later one. :func:`find_units` finds the row, :func:`cut_stages` deals
it out in contiguous stages.

On failure: a model that cannot be cut so often, or a cut point that is none, is a UsageError before any rank has met
another. Whether ``forward`` really goes through the row is found by a probe on the first batch (see ``pipeline.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import nn

from elastictrain.errors import UsageError


def equal_blocks(module: nn.Module) -> list[str]:
    """The run of children of one class, anywhere in the module, that has the most parameters beside its largest one.

    That is what need not be there while one of them is. So the layers of a small model win over the matrices of one
    layer, and over its experts. Embeddings are what blocks stand behind, and lists cannot be called: neither is a block.
    """
    best: list[str] = []
    best_size = 0
    for prefix, parent in module.named_modules():
        run: list[str] = []
        size = largest = 0
        previous: type | None = None
        for name, child in parent.named_children():
            if type(child) is not previous:
                run, size, largest = [], 0, 0
            previous = type(child)
            numel = sum(p.numel() for p in child.parameters())
            if numel == 0 or isinstance(child, (nn.Embedding, nn.ModuleList, nn.ModuleDict)):
                continue
            run.append(f"{prefix}.{name}" if prefix else name)
            size, largest = size + numel, max(largest, numel)
            if size - largest > best_size:
                best, best_size = list(run), size - largest
    return best


def named_units(task: nn.Module) -> list[str] | None:
    """What the task's ``pipeline_units()`` names; None where it leaves that to us.

    Raises:
        UsageError: it names a module that is not there, or one twice, or one inside of another.
    """
    tell: Any = getattr(task, "pipeline_units", None)
    chosen = tell() if callable(tell) else None
    if chosen is None:
        return None
    names, modules = list(chosen), dict(task.named_modules())
    if missing := [name for name in names if name not in modules]:
        raise UsageError(f"pipeline_units() names {missing[0]!r}, which is no module of {type(task).__name__}")
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"pipeline_units() names {name!r} twice")
        if inner := [other for other in names if other.startswith(f"{name}.")]:
            raise UsageError(f"pipeline_units() names {name!r} and {inner[0]!r} inside of it: name one of them")
    return names


def block_names(task: nn.Module) -> list[str]:
    """The blocks that a model is made of: ``pipeline_units()`` of the task, else its run of equal blocks.

    Raises:
        UsageError: ``pipeline_units()`` names a module that is not there.
    """
    chosen = named_units(task)
    return equal_blocks(task) if chosen is None else chosen


def find_units(task: nn.Module) -> list[str]:
    """Every unit in order: those that the task names, else its run of equal blocks, else the children of its largest
    ``nn.Sequential``; with the modules that stand before and after them. Empty where it has none of these.
    """
    names = named_units(task)
    if names is None:
        names = equal_blocks(task) or _largest_sequential(task)
    if not names:
        return []
    found = row(task, names)
    if [name for name in found if name in names] == names:
        return found
    first = min(found.index(name) for name in names)  # an order of its own: what stands between goes behind
    others = [name for name in found if name not in names]
    return [name for name in others if found.index(name) < first] + names + others[first:]


def row(task: nn.Module, names: Sequence[str]) -> list[str]:
    """The named units, and whatever else stands before, between and after them, in the order of definition."""
    return list(_row("", task, set(names)))


def _largest_sequential(task: nn.Module) -> list[str]:
    best: list[str] = []
    best_size = 0
    for prefix, module in task.named_modules():
        if isinstance(module, nn.Sequential):
            size = sum(p.numel() for p in module.parameters())
            names = [f"{prefix}.{name}" if prefix else name for name, _ in module.named_children()]
            if len(names) > 1 and size > best_size:
                best, best_size = names, size
    return best


def _row(prefix: str, module: nn.Module, units: set[str]) -> Iterator[str]:
    """The units below ``module``, and whatever else there has something to save, in the order of definition.

    What has nothing (a dropout, a table of positions that is made anew each time) is there on every stage.
    """
    for child_name, child in module.named_children():
        name = f"{prefix}.{child_name}" if prefix else child_name
        if name in units:
            yield name
        elif any(unit.startswith(f"{name}.") for unit in units):
            yield from _row(name, child, units)
        elif isinstance(module, nn.Sequential) or child.state_dict(keep_vars=True):
            yield name


@dataclass(frozen=True)
class Cut:
    """The stages of a pipeline.

    Args:
        units: names of all units, in order.
        stages: for each stage the indices of its units.
        owners: for each stage the pp coordinate of the rank that runs it.
    """

    units: tuple[str, ...]
    stages: tuple[range, ...]
    owners: tuple[int, ...]

    @property
    def num_stages(self) -> int:
        return len(self.stages)

    def of_rank(self, pp_rank: int) -> list[int]:
        """The stages of one rank, in order."""
        return [stage for stage, owner in enumerate(self.owners) if owner == pp_rank]

    def stage_of(self, unit: int) -> int:
        return next(index for index, stage in enumerate(self.stages) if unit in stage)

    def __str__(self) -> str:
        def named(stage: range) -> str:
            first, last = self.units[stage[0]], self.units[stage[-1]]
            return first if first == last else f"{first} to {last}"

        return "; ".join(
            f"stage {index} (pp {owner}): {named(stage)}"
            for index, (stage, owner) in enumerate(zip(self.stages, self.owners, strict=True))
        )


def cut_stages(
    task: nn.Module, *, num_stages: int, owners: Sequence[int], starts: Sequence[str] = (), what: str = "pp"
) -> Cut:
    """Deal the model's units out to ``num_stages`` stages.

    Args:
        owners: for each stage the pp coordinate that runs it.
        starts: the units that begin stages 1, 2, …; none: balanced by the number of parameters.
        what: the setting that asks for so many stages, for messages.

    Raises:
        UsageError: there are not enough units with weights, or ``starts`` are not units in order.
    """
    assert len(owners) == num_stages
    units = find_units(task)
    if not units:
        raise UsageError(
            f"{type(task).__name__} has no run of equal blocks and no nn.Sequential to cut: define pipeline_units(), the"
            " names of the modules that forward() calls one after another"
        )
    if starts:
        return Cut(tuple(units), tuple(_given(units, num_stages, starts, what)), tuple(owners))
    sizes = [sum(p.numel() for p in task.get_submodule(name).parameters()) for name in units]
    atoms: list[list[int]] = []  # a unit with weights, and those without that follow it
    for index, size in enumerate(sizes):
        if size and (len(atoms) == 0 or any(sizes[i] for i in atoms[-1])):
            atoms.append([])
        if not atoms:
            atoms.append([])
        atoms[-1].append(index)
    if len(atoms) < num_stages:
        raise UsageError(
            f"{what} needs {num_stages} pipeline stages and {type(task).__name__} has {len(atoms)} parts with weights to"
            f" cut between ({_some(units)}): lower pp, or name smaller modules in pipeline_units()"
        )
    groups = balanced([sum(sizes[i] for i in atom) for atom in atoms], num_stages)
    stages = [range(atoms[group[0]][0], atoms[group[-1]][-1] + 1) for group in groups]
    return Cut(tuple(units), tuple(stages), tuple(owners))


def _given(units: list[str], num_stages: int, starts: Sequence[str], what: str) -> list[range]:
    if unknown := [name for name in starts if name not in units]:
        raise UsageError(f"pp_split names {unknown[0]!r}, where the model cannot be cut: its units are {_some(units)}")
    if len(starts) != num_stages - 1:
        raise UsageError(
            f"pp_split names {len(starts)} cut points, and {what} makes {num_stages} stages: name {num_stages - 1}"
        )
    edges = [0, *(units.index(name) for name in starts), len(units)]
    if any(a >= b for a, b in pairwise(edges)):
        raise UsageError(f"pp_split {'+'.join(starts)}: name units in the order of the model, not the first one")
    return [range(a, b) for a, b in pairwise(edges)]


def balanced(sizes: Sequence[int], num_groups: int) -> list[range]:
    """Contiguous groups, none empty, whose largest sum is as small as it can be."""
    low, high = max(sizes), sum(sizes)
    while low < high:
        middle = (low + high) // 2
        if len(_filled(sizes, 1, middle)) <= num_groups:
            high = middle
        else:
            low = middle + 1
    return _filled(sizes, num_groups, low)


def _filled(sizes: Sequence[int], at_least: int, limit: int) -> list[range]:
    """Groups of at most ``limit``, filled one after another; split further where there would be too few of them."""
    groups: list[range] = []
    start, total = 0, 0
    for index, size in enumerate(sizes):
        must_close = len(sizes) - index <= at_least - len(groups) - 1
        if index > start and (total + size > limit or must_close):
            groups.append(range(start, index))
            start, total = index, 0
        total += size
    return [*groups, range(start, len(sizes))]


def _some(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 8 else f"{', '.join(names[:4])}, …, {', '.join(names[-2:])}"
