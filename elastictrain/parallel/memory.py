"""What one rank holds of a model in one layout, by kind, from sizes alone.

A :class:`Model` says what each part of a model weighs (:mod:`elastictrain.parallel.measure` makes one) and
:func:`memory` what a rank at one place of a mesh holds of it when it holds most:

* parameters and buffers, gradients, optimizer state: exact, from shapes;
* communication: weights that are gathered and gradients on their way, from the sizes of the units; messages between the
  stages of a pipeline;
* activations: those of the microbatches in flight, as measured for one of them and shared out over tensor and context
  parallelism.

Not counted: the allocator's fragmentation, and the libraries' own buffers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, reduce
from itertools import pairwise
from operator import add
from typing import Any, NamedTuple

from elastictrain.config import MeshShape
from elastictrain.parallel.units import balanced


class Weight(NamedTuple):
    """One parameter.

    Args:
        state: bytes of optimizer state that is cut as the parameter is.
        fixed: bytes of optimizer state that every rank keeps whole.
        tp_dim: the dim that tensor parallelism cuts; None: it keeps the parameter whole.
    """

    shape: tuple[int, ...]
    itemsize: int = 4
    trains: bool = True
    state: int = 0
    fixed: int = 0
    tp_dim: int | None = None

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.itemsize


@dataclass(frozen=True)
class Saved:
    """Bytes of activations of one microbatch.

    Args:
        whole: the same on every tensor-parallel rank.
        cut: shared out by tensor parallelism.
        casts: copies of weights in the precision of the computation; a sharded model gathers them so instead.
        largest: the largest single tensor.
        largest_is_cut: tensor parallelism shares it out.
        attended: keys and values of attention, which ranks of context parallelism have of all tokens.
        attended_cut: those that tensor parallelism shares out.
    """

    whole: int = 0
    cut: int = 0
    casts: int = 0
    largest: int = 0
    largest_is_cut: bool = False
    attended: int = 0
    attended_cut: int = 0

    def local(self, shape: MeshShape) -> int:
        casts = 0 if _is_sharded(shape) else self.casts // shape.tp
        attended = self.attended_local(shape) * (shape.cp - 1) // shape.cp
        return (self.whole + self.cut // shape.tp) // shape.cp + attended + casts

    def attended_local(self, shape: MeshShape) -> int:
        """Keys and values of all tokens, where ranks have a part of the tokens."""
        return self.attended + self.attended_cut // shape.tp if shape.cp > 1 else 0

    def largest_local(self, shape: MeshShape) -> int:
        return self.largest // (shape.cp * shape.tp if self.largest_is_cut else shape.cp)


@dataclass(frozen=True)
class Part:
    """A piece of the model that is never cut by a pipeline.

    Args:
        is_unit: its weights are gathered one part at a time; those of other parts stay gathered through a pass.
        tied: weights of an earlier part that this one uses too, and holds itself on another stage.
        buffers: bytes of them.
        saved: what its forward pass keeps for the backward pass.
        kept: the same where activations are recomputed.
        redone: the most that comes back at once when one of its modules is recomputed.
        sent: bytes that it returns for one microbatch.
    """

    weights: tuple[Weight, ...] = ()
    is_unit: bool = False
    tied: tuple[Weight, ...] = ()
    buffers: int = 0
    saved: Saved = Saved()
    kept: Saved = Saved()
    redone: Saved = Saved()
    sent: int = 0

    @property
    def num_bytes(self) -> int:
        return sum(weight.num_bytes for weight in self.weights)


@dataclass(frozen=True)
class Model:
    """A model and its training step, as far as memory goes.

    Args:
        parts: in the order of the forward pass; one part alone cannot be cut by a pipeline.
        num_slots: microbatches in a global batch; None: as many as there are ranks to share them.
        compute_itemsize: bytes of a number in the forward pass where it is not the parameters' own.
        recompute: activations are recomputed.
        knows_activations: they are there.
        num_tokens: in a sequence that context parallelism would share out.
        must_divide: numbers that the tensor-parallel degree has to divide, by what they are.
        refused: axis -> why this model cannot have it.
        notes: what was assumed, for a person.
    """

    parts: tuple[Part, ...]
    num_slots: int | None = None
    compute_itemsize: int | None = None
    recompute: bool = False
    knows_activations: bool = False
    num_tokens: int | None = None
    must_divide: Mapping[str, int] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def parameter_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)

    @property
    def num_atoms(self) -> int:
        """Into how many stages it can be cut."""
        return len(self.atoms)

    @cached_property
    def atoms(self) -> tuple[range, ...]:
        """The pieces that a pipeline may deal out: a part with weights, and those without that follow it."""
        starts = [i for i, part in enumerate(self.parts) if part.weights][1:]
        return tuple(range(a, b) for a, b in pairwise([0, *starts, len(self.parts)]))

    @cached_property
    def atom_bytes(self) -> tuple[int, ...]:
        return tuple(sum(self.parts[i].num_bytes for i in atom) for atom in self.atoms)

    @cached_property
    def alike(self) -> tuple[int, ...]:
        """For each part the index of the first that equals it: most of a large model is one block many times."""
        first: dict[Part, int] = {}
        return tuple(first.setdefault(part, index) for index, part in enumerate(self.parts))


KINDS = ("parameters", "gradients", "optimizer", "communication", "activations")


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank, by kind."""

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    communication: int = 0  # gathered weights, gradients on their way, messages between stages
    activations: int = 0

    @property
    def total(self) -> int:
        return sum(getattr(self, kind) for kind in KINDS)


def _is_sharded(shape: MeshShape) -> bool:
    """Does FSDP lay out the parameters? Also where they are replicated, and split along other axes as well."""
    return shape.dp_shard > 1 or shape.cp > 1 or (shape.dp > 1 and shape.world_size > shape.dp)


def _zero(shape: MeshShape) -> int:
    """The stage of ZeRO; a pipeline gathers a stage's weights, and reduces its gradients, once a step."""
    return 1 if shape.pp > 1 else shape.zero


# ---- what a rank holds ----------------------------------------------------------------------------------------------


def chunk(size: int, num: int, index: int = 0) -> int:
    """Of ``size`` elements cut as ``torch.chunk`` cuts them, those of one rank; the first has the most."""
    each = -(-size // num)
    return max(0, min(each, size - index * each))


class _State(NamedTuple):
    """What belongs to weights, in bytes."""

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    gathered: int = 0  # parameters, not sharded
    reduced: int = 0  # gradients, not sharded

    def plus(self, other: _State) -> _State:
        return _State(*map(add, self, other))


@lru_cache(maxsize=100_000)
def _state(weights: tuple[Weight, ...], tp: int, shards: int, tp_rank: int, shard_rank: int) -> _State:
    total = _State()
    for weight in weights:
        shape = list(weight.shape)
        if weight.tp_dim is not None:
            shape[weight.tp_dim] = chunk(shape[weight.tp_dim], tp, tp_rank)
        whole = math.prod(shape)
        if shape:  # sharded along the first dim
            shape[0] = chunk(shape[0], shards, shard_rank)
        mine = math.prod(shape)
        share = mine / max(1, math.prod(weight.shape))
        total = total.plus(
            _State(
                mine * weight.itemsize,
                mine * weight.itemsize if weight.trains else 0,
                math.ceil(weight.state * share) + weight.fixed,
                whole * weight.itemsize,
                whole * weight.itemsize if weight.trains else 0,
            )
        )
    return total


def memory(model: Model, shape: MeshShape, *, stage: int = 0, tp_rank: int = 0, shard_rank: int = 0) -> Memory:
    """What a rank at this place of the mesh holds when it holds most."""
    span = stages(model, shape.pp)[stage]
    indices = model.alike[span.start : span.stop]

    def state(weights: tuple[Weight, ...]) -> _State:
        return _state(weights, shape.tp, shape.dp_shard * shape.cp, tp_rank, shard_rank)

    states = {i: state(model.parts[i].weights) for i in set(indices)}
    units = [states[i] for i in indices if model.parts[i].is_unit]
    outside = [states[i] for i in indices if not model.parts[i].is_unit]
    if span.start > 0:
        outside += [state(model.parts[i].tied) for i in set(indices)]
    root = reduce(_State.plus, outside, _State())
    total = reduce(_State.plus, units, root)
    # Whole gradients are there while microbatches add to them, and are cut one unit after another.
    adds_up = _is_sharded(shape) and _zero(shape) == 1 and _num_slots(model, shape) > 1
    return Memory(
        parameters=total.parameters + sum(model.parts[i].buffers for i in span),
        gradients=total.reduced if adds_up else total.gradients,
        optimizer=total.optimizer,
        communication=_communication(model, shape, units, root, total) + _messages(model, shape, span),
        activations=_activations(model, shape, stage, indices),
    )


def _num_slots(model: Model, shape: MeshShape) -> float:
    """The most microbatches of a step that a rank may have."""
    return math.inf if model.num_slots is None else max(1, -(-model.num_slots // shape.dp))


def _communication(model: Model, shape: MeshShape, units: list[_State], root: _State, total: _State) -> int:
    if not _is_sharded(shape):  # gradients are packed for the sum over replicas, all at once in the end
        return total.gradients if shape.dp > 1 else 0
    low = model.compute_itemsize is not None and model.compute_itemsize < 4
    scale = model.compute_itemsize / 4 if low and model.compute_itemsize else 1.0
    sizes = sorted((unit.gathered for unit in units), reverse=True)
    # A unit is gathered while the one before it computes; what belongs to no unit stays gathered, and with ZeRO 1 and 2
    # every unit does.
    gathered = root.gathered + sum(sizes[:2] if _zero(shape) == 3 else sizes)
    # The largest unit's gradients as they are computed, and as they are reduced.
    reduced = max([root.reduced, *(unit.reduced for unit in units)])
    return math.ceil(gathered * scale + reduced * (1.0 + scale))


def _messages(model: Model, shape: MeshShape, span: range) -> int:
    """What goes from stage to stage. Torch keeps, for every microbatch of a step, a buffer for what a stage receives and
    its gradient, and one for the gradient of what it sends."""
    if shape.pp == 1:
        return 0
    received = model.parts[span.start - 1].sent if span.start > 0 else 0
    sent = model.parts[span.stop - 1].sent if span.stop < len(model.parts) else 0
    num_slots = shape.pp if model.num_slots is None else _num_slots(model, shape)  # as many keep all stages busy
    return int(num_slots) * (2 * received + sent) // shape.cp


def _activations(model: Model, shape: MeshShape, stage: int, indices: Sequence[int]) -> int:
    # 1F1B: so many forward passes before the first backward pass
    in_flight = int(min(shape.pp - stage, _num_slots(model, shape)))
    parts = {i: model.parts[i] for i in set(indices)}
    kept = {i: (part.kept if model.recompute else part.saved).local(shape) for i, part in parts.items()}
    # The backward pass of the first microbatch: part after part, from the last, lets go of what it kept. While it
    # computes, it has what it recomputed, and the gradient of a layer's output and of its input; with context parallelism
    # also those of all keys and values: of both pieces of the queries, and on their way.
    own = {i: 2 * part.saved.largest_local(shape) + 3 * part.saved.attended_local(shape) for i, part in parts.items()}
    if model.recompute:
        own = {i: own[i] + part.redone.local(shape) for i, part in parts.items()}
    total = here = sum(kept[i] for i in indices)
    most = 0
    for i in reversed(indices):
        most = max(most, here + own[i])
        here -= kept[i]
    return (in_flight - 1) * total + most


def stages(model: Model, pp: int) -> list[range]:
    """The parts of each pipeline stage, balanced by parameters."""
    if pp == 1:
        return [range(len(model.parts))]
    atoms = model.atoms
    return [range(atoms[g.start].start, atoms[g.stop - 1].stop) for g in _balanced(model.atom_bytes, pp)]


def different_stages(model: Model, pp: int) -> list[int]:
    """The stages of which one may be the fullest: of those with equal parts the first, which has most in flight.

    The first and the last one count for themselves, as they send and receive less.
    """
    first: dict[tuple[Any, ...], int] = {}
    for stage, span in enumerate(stages(model, pp)):
        first.setdefault((stage == 0, stage == pp - 1, *model.alike[span.start : span.stop]), stage)
    return list(first.values())


@lru_cache(maxsize=1000)
def _balanced(sizes: tuple[int, ...], num_groups: int) -> tuple[range, ...]:
    """As the pipeline is cut; asked for again and again."""
    assert len(sizes) >= num_groups, (len(sizes), num_groups)
    return tuple(balanced(sizes, num_groups))
