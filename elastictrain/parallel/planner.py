"""Which layout a model gets on so many devices: arithmetic on a description of the model, nothing else.

:func:`plan` looks at every layout ``pp × dp_replicate × dp_shard × cp × tp`` that multiplies to the ranks and takes, of
those that fit, the one with

1. a microbatch for every data-parallel rank,
2. the smallest ``tp × cp × pp``, then the least context and the least pipeline parallelism,
3. the least sharding: replicas exchange gradients once per step, shards their weights in every pass.

Time is not weighed. A tenth of each device is left free for what :mod:`elastictrain.parallel.memory` does not count;
where activations are not known, half of it.

No process group, no tensor, no clock: when the number of ranks changes, the same function is asked again.

On failure: nothing here raises. Where nothing fits, the layout that needs least is chosen, and the reason says so; it also
says which axis the model cannot have, where a layout with that axis would have been taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from elastictrain.config import AXES, MeshShape
from elastictrain.parallel.memory import Memory, Model, different_stages, memory

USABLE = 0.9  # of a device: the rest is the allocator's and the libraries'
USABLE_BLIND = 0.5  # … where activations are not known
SMALL = 0.25  # of a device: state that is replicated without looking any further


@dataclass(frozen=True)
class Devices:
    """How many ranks, how many of them on a node, and the memory of each."""

    num_ranks: int
    ranks_per_node: int
    num_bytes: int


@dataclass(frozen=True)
class Layout:
    """One layout, as its fullest rank sees it.

    Args:
        problem: why it cannot be at all; None where it can.
        idle: data-parallel ranks without a slot.
    """

    shape: MeshShape
    memory: Memory
    fits: bool
    problem: str | None = None
    idle: int = 0

    @property
    def can_be_chosen(self) -> bool:
        return self.problem is None

    @property
    def preference(self) -> tuple[int, ...]:
        s = self.shape
        return (self.idle, s.tp * s.cp * s.pp, s.cp, s.pp, s.dp_shard)


@dataclass(frozen=True)
class Plan:
    """Every layout, the best first, and the one to take.

    Args:
        why: the choice, in one line.
        room: bytes of a device that a layout may use.
    """

    layouts: tuple[Layout, ...]
    chosen: Layout
    why: str
    room: int


def plan(model: Model, devices: Devices, *, only: MeshShape | None = None) -> Plan:
    """Weigh every layout and choose one.

    Args:
        only: weigh this layout alone, and choose it, whatever comes out.
    """
    room = int(devices.num_bytes * (USABLE if model.knows_activations else USABLE_BLIND))
    if only is not None:
        (one,) = layouts = [_weigh(model, only, devices, room)]
        verb = "fits" if one.fits else "does not fit"
        return Plan(tuple(layouts), one, one.problem or f"{size(one.memory.total)} {verb} {size(room)}", room)
    layouts = [_weigh(model, shape, devices, room) for shape in shapes(devices.num_ranks, model)]
    layouts.sort(key=lambda layout: (not layout.fits, layout.problem is not None, layout.preference))
    possible = [layout for layout in layouts if layout.can_be_chosen]
    assert possible, "data parallelism is always possible"
    fitting = [layout for layout in possible if layout.fits]
    if (why := _replicate(model.parameter_bytes, devices)) is not None:
        chosen = next(layout for layout in possible if layout.shape == MeshShape(dp_replicate=devices.num_ranks))
    else:
        chosen = fitting[0] if fitting else min(possible, key=lambda layout: (layout.memory.total, layout.preference))
        why = _why(model, chosen, room) + _forgone(model, devices, layouts, chosen, room)
    return Plan(tuple(layouts), chosen, why, room)


def choose(devices: Devices, *, parameter_bytes: int, measure: Callable[[], Model]) -> tuple[MeshShape, str]:
    """The layout of :func:`plan`, and the reason for it in one line; the model is measured only where it matters."""
    if (why := _replicate(parameter_bytes, devices)) is not None:
        return MeshShape(dp_replicate=devices.num_ranks), why
    made = plan(measure(), devices)
    return made.chosen.shape, made.why


def _replicate(parameter_bytes: int, devices: Devices) -> str | None:
    """Why every rank keeps a copy of everything without a further look; None where that is to be weighed.

    Parameters, gradients, Adam's moments, and gradients on their way are five times the parameters. Where that is
    little there is not much to gain, and no code of the user's needs to run for an estimate of the rest.
    """
    if devices.num_ranks == 1:
        return "one rank"
    state = 5 * parameter_bytes
    if state > SMALL * devices.num_bytes:
        return None
    return f"every rank keeps the whole state: it needs {size(state)} of a device's {size(devices.num_bytes)}"


def shapes(num_ranks: int, model: Model) -> Iterator[MeshShape]:
    """Every mesh of so many ranks that the model has units for."""

    def split(rest: int, axes: tuple[str, ...], sizes: dict[str, int]) -> Iterator[MeshShape]:
        if not axes:
            yield MeshShape(**sizes, dp_replicate=rest)
            return
        for size in divisors(rest):
            if axes[0] == "pp" and size > model.num_atoms:
                break
            yield from split(rest // size, axes[1:], {**sizes, axes[0]: size})

    return split(num_ranks, ("pp", "tp", "cp", "dp_shard"), {})


@lru_cache(maxsize=10_000)
def divisors(number: int) -> tuple[int, ...]:
    small = [i for i in range(1, math.isqrt(number) + 1) if number % i == 0]
    return tuple(sorted({*small, *(number // i for i in small)}))


def _weigh(model: Model, shape: MeshShape, devices: Devices, room: int) -> Layout:
    if shape.pp > model.num_atoms:
        problem = f"pp={shape.pp} has more stages than the model has parts to cut between ({model.num_atoms})"
        return Layout(shape, Memory(), False, problem)
    held = max(
        (memory(model, shape, stage=stage) for stage in different_stages(model, shape.pp)), key=lambda one: one.total
    )
    refused = _problem(model, shape, devices)
    idle = max(0, shape.dp - model.num_slots) if model.num_slots is not None else 0
    return Layout(shape, held, refused is None and held.total <= room, refused, idle)


def _problem(model: Model, shape: MeshShape, devices: Devices) -> str | None:
    for axis in AXES:
        if getattr(shape, axis) > 1 and axis in model.refused:
            return model.refused[axis]
    if shape.tp > devices.ranks_per_node or devices.ranks_per_node % shape.tp:
        return f"tp={shape.tp} is not within a node of {devices.ranks_per_node}"
    for what, number in model.must_divide.items():
        if number % shape.tp:
            return f"tp={shape.tp} does not divide {what}={number}"
    if shape.cp > 1 and shape.pp > 1:
        return "cp and pp do not go together"
    if model.num_tokens is not None and shape.cp > 1 and model.num_tokens % (2 * shape.cp):
        return f"twice cp={shape.cp} does not divide the {model.num_tokens} tokens of a sequence"
    if model.num_slots is not None and shape.pp > max(1, model.num_slots // shape.dp):
        return f"pp={shape.pp} has more stages than a rank has microbatches"
    return None


def _why(model: Model, chosen: Layout, room: int) -> str:
    need, left = size(chosen.memory.total), "" if model.knows_activations else ", activations not counted"
    if not chosen.fits:
        return f"nothing fits {size(room)}; {chosen.shape} needs least, {need}{left}"
    if chosen.shape.dp_shard == chosen.shape.tp == chosen.shape.cp == chosen.shape.pp == 1:
        return f"every rank keeps the whole state: {need} of {size(room)}{left}"
    return f"ranks share the state: {need} of {size(room)}{left}"


def _forgone(model: Model, devices: Devices, layouts: list[Layout], chosen: Layout, room: int) -> str:
    """Why the layout that would be taken otherwise is not: the axes that this model cannot have."""
    refused, anything = set(model.refused.values()), replace(model, refused={})
    better = [
        one
        for one in layouts
        if one.problem in refused and one.memory.total <= room
        if not chosen.fits or one.preference < chosen.preference
        if _problem(anything, one.shape, devices) is None
    ]
    if not better:
        return ""
    best = min(better, key=lambda one: one.preference)
    missing = [axis for axis in AXES if getattr(best.shape, axis) > 1 and axis in model.refused]
    return "".join(f"; without {axis}: {model.refused[axis]}" for axis in missing)


def size(num_bytes: float) -> str:
    """``812 KiB``, ``4.2 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024 or unit == "GiB":
            break
        num_bytes /= 1024
    digits = 1 if num_bytes < 10 or unit == "GiB" else 0
    return f"{num_bytes:.{digits}f}".removesuffix(".0") + f" {unit}"
