"""From the user's module to a model that trains on this mesh. The only place that knows the order of wrapping:

    build on meta → tensor parallel → cut to the stage → activation checkpointing → compile → make weights and shard

A task's ``configure_model`` runs without making weights (:mod:`elastictrain.parallel.deferred`). They are then made unit
by unit, at full size, and each unit is cut to this rank's shard before the next is made, so that no rank ever holds more
than its shards and one unit. Modules that come with their weights keep them; rank 0's count.

On failure: code that cannot be deferred is built with its weights instead, on every rank, and the summary says why.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from elastictrain.config import MeshConfig, MeshShape
from elastictrain.data.slots import named_seed
from elastictrain.errors import UsageError
from elastictrain.parallel import topology
from elastictrain.parallel.buffers import RunningStats
from elastictrain.parallel.clipping import clip_grad_norm_
from elastictrain.parallel.compiled import compile_blocks
from elastictrain.parallel.context import Context, check_context, make_context
from elastictrain.parallel.deferred import NotDeferrable, Recipe, record
from elastictrain.parallel.float8 import float8_modules, use_float8
from elastictrain.parallel.forwards import Forwards
from elastictrain.parallel.memory import Model
from elastictrain.parallel.mesh import Mesh, Ranks, device_bytes, make_mesh
from elastictrain.parallel.parts import part_names, parts_of
from elastictrain.parallel.pipeline import Pipeline
from elastictrain.parallel.planner import Devices, choose
from elastictrain.parallel.plans import read_plan
from elastictrain.parallel.recompute import recompute, recomputed_modules
from elastictrain.parallel.replicate import GradientSum
from elastictrain.parallel.schedules import SPLIT_BACKWARD, owners
from elastictrain.parallel.shard import Sharded, shard_units
from elastictrain.parallel.tensor import TensorParallel, cut, empty
from elastictrain.parallel.units import Cut, block_names, cut_stages
from elastictrain.step_plan import StepPlan


class Shaping:
    """What the plan changes in the model's blocks. Names and classes stay; :meth:`close` takes it back.

    Made while the model is whole, so that a name that matches nothing is refused on every rank alike; applied to what is
    left of it on this rank.

    Raises:
        UsageError: the plan names what the model does not have, or cannot work on this mesh.
    """

    def __init__(self, task: nn.Module, plan: StepPlan, shape: MeshShape = MeshShape()) -> None:  # noqa: B008 - frozen
        if shape.tp > 1 and plan.compilation is not None and plan.recompute is not None:
            raise UsageError(
                f"mesh axis tp={shape.tp} with Compile and ActivationCheckpointing: torch cannot compile blocks that are"
                " both split and recomputed; leave out one of the two"
            )
        is_float8 = plan.precision.compute == "fp8"
        if shape.tp > 1 and is_float8:
            raise UsageError(
                f'mesh axis tp={shape.tp} with MixedPrecision("fp8"): layers that are split cannot; use "bf16"'
            )
        self._plan = plan
        self._float8: list[str] = []
        self._rounding = Forwards()
        self._recomputed: list[str] = []
        self._blocks: list[str] = []
        self._recomputing, self._compiling = Forwards(), Forwards()
        if plan.recompute is not None or plan.compilation is not None or is_float8:
            self._blocks = block_names(task)
        if is_float8:
            self._float8 = float8_modules(task, self._blocks)
        if plan.recompute is not None:
            self._recomputed = recomputed_modules(task, self._blocks, plan.recompute)
        if plan.compilation is not None and not self._blocks:
            raise UsageError(
                f"Compile: {type(task).__name__} has no run of equal blocks; name them in pipeline_units(), or compile the"
                " parts yourself (self.part.compile() in configure_model)"
            )

    def apply(self, task: nn.Module) -> None:
        """Change the blocks: within a compiled block its activations may be recomputed, not the other way round."""
        use_float8(task, self._float8, self._rounding)
        if self._plan.recompute is not None:
            recompute(task, self._recomputed, self._plan.recompute, self._recomputing)
        if self._plan.compilation is not None:
            compile_blocks(task, self._blocks, self._plan.compilation, self._compiling)

    def eager(self) -> AbstractContextManager[None]:
        """Within, blocks are not compiled."""
        return self._compiling.without()

    def close(self) -> None:
        self._compiling.restore()
        self._recomputing.restore()
        self._rounding.restore()


@dataclass
class Built:
    """The model of one generation."""

    mesh: Mesh
    sharded: Sharded | None  # where FSDP lays out the parameters
    tensor: TensorParallel | None  # with a tp axis
    context: Context | None  # with a cp axis
    pipeline: Pipeline | None
    num_parameters: int
    num_trainable: int
    notes: list[str]  # for the start-up summary
    shaping: Shaping
    gradients: GradientSum | None = field(init=False)  # several data-parallel ranks, none of them sharded
    running_stats: RunningStats = field(init=False)  # without a pipeline, which has its own

    def attach(self, task: nn.Module) -> None:
        """Put on the module what :meth:`close` takes off again."""
        is_summed = self.mesh.dp_size > 1 and self.sharded is None and self.pipeline is None
        self.gradients = GradientSum(task.parameters()) if is_summed else None
        self.running_stats = RunningStats(task if self.pipeline is None else nn.Module(), self.mesh)

    @property
    def is_cut(self) -> bool:
        """Are the module's weights laid out over ranks, and stay so after training?"""
        return self.sharded is not None or self.tensor is not None or self.pipeline is not None

    def clip_grad_norm_(self, parameters: Iterable[Tensor], max_norm: float) -> Tensor:
        """Clip by the L2 norm of the gradients of the whole mesh, and return it; a collective where there are ranks."""
        if self.pipeline is not None:
            return self.pipeline.clip_grad_norm_(parameters, max_norm)
        return clip_grad_norm_(parameters, max_norm)

    def close(self) -> None:
        """Take back what belongs to this generation; the module is the user's own again, but for its shards."""
        self.running_stats.close()
        self.shaping.close()
        if self.gradients is not None:
            self.gradients.close()

    def reshape(self, task: nn.Module, plan: StepPlan) -> None:
        """The same layout for a later call of the trainer, with the plan of that one."""
        self.shaping = Shaping(task, plan, self.mesh.shape)
        self.shaping.apply(task)
        self.attach(task)

    def gathered(self) -> AbstractContextManager[None]:
        """Around an evaluation: ranks of a pipeline may then differ in their number of batches."""
        return nullcontext() if self.pipeline is None else self.pipeline.placed.gathered()


def configure(
    task: nn.Module, configure_model: Callable[[], Any], *, defer: bool, seed: int
) -> tuple[Recipe | None, list[str]]:
    """Call the module's ``configure_model``, without making weights where ``defer``.

    Returns:
        the recipe for the weights, None where they are there already, and notes for the start-up summary.
    """
    if not defer:
        configure_model()
        return None, []
    weights_seed = named_seed(seed, "weights")
    try:
        return record(configure_model, task, seed=weights_seed), []
    except NotDeferrable as error:
        state = torch.default_generator.get_state()
        torch.default_generator.manual_seed(weights_seed)
        configure_model()
        torch.default_generator.set_state(state)
        return None, [f"configure_model needs values while it builds ({error}): every rank builds the whole model"]


def lay_out(
    task: nn.Module,
    recipe: Recipe | None,
    *,
    ranks: Ranks,
    mesh: MeshConfig,
    local_world_size: int,
    plan: StepPlan,
    weights: bool,
    measure: Callable[[], Model] | None = None,
) -> Built:
    """Choose the mesh, give the module its weights on the device, and shard it.

    Args:
        recipe: how to make the tensors that have no values yet.
        plan: what the step is made of.
        weights: False where they will be restored: parameters are then left uninitialised.
        measure: what the planner asks for where the choice is not plain; None: parameters alone are known.

    Raises:
        UsageError: the mesh does not fit the ranks, or the plan the model.
    """
    parameters = list(task.parameters())
    notes: list[str] = [] if ranks.zones is None else [f"topology: {ranks.zones}"]
    shape: MeshShape | None = None
    if mesh.preset == "auto" and ranks.world_size > 1:
        shape, why = _choose(task, ranks, local_world_size, mesh.device_memory, measure)
        notes.append(f"mesh auto: {why}")
    shape = mesh.resolve(ranks.world_size, auto=shape)
    if (costly := topology.warning(shape, local_world_size)) is not None:
        notes.append(costly)
    tensor_plan = read_plan(task, shape.tp) if shape.tp > 1 else None
    if shape.cp > 1:
        check_context(task, plan, cp=shape.cp)
    parts = None if shape.pp == 1 else _cut(task, mesh, shape.pp, plan)
    units = shard_units(task) if shape.world_size > 1 else []
    shaping = Shaping(task, plan, shape)  # the last that may refuse: no rank is left alone while it makes groups
    made = make_mesh(ranks, shape, last_stage=None if parts is None else parts.owners[-1])
    num_parameters = sum(p.numel() for p in parameters)
    num_trainable = sum(p.numel() for p in parameters if p.requires_grad)
    del parameters

    place = _Placer(recipe, ranks, weights=weights)
    tensor: TensorParallel | None = None
    if tensor_plan is not None:
        place.given(task)  # before they are cut, weights that are there must be the same on all ranks
        tensor = TensorParallel(task, tensor_plan, mesh=made, replaced=place.replace, idle=units)
    shaping.apply(task)
    sharded: Sharded | None = None
    pipeline: Pipeline | None = None
    if parts is not None:
        place.given(task)  # while every rank still has every weight
        pipeline = Pipeline(task, parts, made, schedule=mesh.pp_schedule)
        pipeline.place(place, precision=plan.precision)
        notes.append(f"pipeline of {parts.num_stages} stages, {mesh.pp_schedule}: {parts}")
    elif made.is_sharded:
        sharded = Sharded(task, mesh=made, units=units, precision=plan.precision, before=place)
        task.to(ranks.device)
    else:
        place(task)
        task.to(ranks.device)
    context = make_context(task, made) if shape.cp > 1 else None
    built = Built(made, sharded, tensor, context, pipeline, num_parameters, num_trainable, notes, shaping)
    built.attach(task)
    return built


def _cut(task: nn.Module, mesh: MeshConfig, pp: int, plan: StepPlan) -> Cut:
    for name, module in task.named_modules():
        if getattr(getattr(module, "config", None), "output_router_logits", False):
            raise UsageError(
                f"{name or type(task).__name__}.config.output_router_logits: the loss of the routers is of all layers, and a"
                " pipeline stage has some of them; set it to False, or use dp_shard instead of pp"
            )
    if mesh.pp_schedule in SPLIT_BACKWARD and plan.recompute is not None and plan.recompute.mode == "selective":
        raise UsageError(
            f'ActivationCheckpointing("selective") repeats a forward pass for each of the two backward passes of'
            f' {mesh.pp_schedule}, which torch cannot: use "full", or another pp_schedule'
        )
    if mesh.pp_schedule in SPLIT_BACKWARD and plan.compilation is not None:
        raise UsageError(
            f"Compile with pp_schedule {mesh.pp_schedule}: torch gives compiled blocks wrong gradients where a backward pass"
            ' comes in two halves; use "1F1B" or "Interleaved1F1B", or leave out Compile'
        )
    if mesh.pp_schedule in SPLIT_BACKWARD and plan.precision.compute == "fp8":
        raise UsageError(
            f'MixedPrecision("fp8") with pp_schedule {mesh.pp_schedule}: a product in float8 has one backward pass; use'
            ' "1F1B" or "Interleaved1F1B", or "bf16"'
        )
    ranks = owners(mesh.pp_schedule, pp=pp, num_cut_points=len(mesh.pp_split))
    what = f"pp={pp} with {mesh.pp_schedule}"
    return cut_stages(task, num_stages=len(ranks), owners=ranks, starts=mesh.pp_split, what=what)


def _choose(
    task: nn.Module, ranks: Ranks, local_world_size: int, num_bytes: int | None, measure: Callable[[], Model] | None
) -> tuple[MeshShape, str]:
    """What the planner says; every rank asks it, and takes rank 0's answer. A collective."""
    there = ranks.gather((num_bytes or device_bytes(ranks.device, local_world_size), local_world_size))
    devices = Devices(
        ranks.world_size,
        ranks_per_node=math.gcd(*(local for _, local in there)),
        num_bytes=min(of_one for of_one, _ in there),
    )
    parameter_bytes = sum(p.numel() * p.element_size() for p in task.parameters())
    weigh = measure or (lambda: Model(tuple(parts_of(task, part_names(task), {}))))
    return ranks.from_main(choose(devices, parameter_bytes=parameter_bytes, measure=weigh))


class _Placer:
    """Puts a part of the model on the device: makes what has no values, takes rank 0's of what has."""

    def __init__(self, recipe: Recipe | None, ranks: Ranks, *, weights: bool) -> None:
        self._recipe, self._ranks, self._weights = recipe, ranks, weights
        self._placed: dict[int, Tensor] = {}  # a tied weight is made once
        self._kept: list[Tensor] = []  # so that no id is used again

    def given(self, part: nn.Module) -> None:
        """Rank 0's values of everything that has values."""
        for tensor in (*part.parameters(), *part.buffers()):
            if tensor.device.type != "meta" and id(tensor) not in self._placed:
                self._kept.append(tensor)
                self._placed[id(tensor)] = self._place(tensor)

    def replace(self, new: Tensor, old: Tensor) -> None:
        """A tensor has become another one, cut to a part."""
        if old.device.type == "meta":
            assert self._recipe is not None
            self._recipe.rename(new, old)

    def __call__(self, part: nn.Module) -> None:
        for module in part.modules():
            tensors = [
                *module.named_parameters(recurse=False, remove_duplicate=False),
                *module.named_buffers(recurse=False, remove_duplicate=False),
            ]
            for name, tensor in tensors:
                if id(tensor) not in self._placed:
                    self._kept.append(tensor)
                    self._placed[id(tensor)] = placed = self._place(tensor)
                    self._placed[id(placed)] = placed
                if (placed := self._placed[id(tensor)]) is not tensor:
                    setattr(module, name, placed)

    def _place(self, tensor: Tensor) -> Tensor:
        is_parameter = isinstance(tensor, nn.Parameter)
        if tensor.device.type != "meta":
            if isinstance(tensor, DTensor):  # cut from values that were the same on all ranks
                return tensor
            self._ranks.broadcast_(tensor.detach())
            return tensor
        assert self._recipe is not None
        if is_parameter and not self._weights:
            value = (
                empty(tensor) if isinstance(tensor, DTensor) else torch.empty_like(tensor, device=self._ranks.device)
            )
        else:
            value = self._recipe.make(self._recipe.name_of(tensor))
            value = cut(value, tensor) if isinstance(tensor, DTensor) else value.to(self._ranks.device)
        if not is_parameter:
            return value
        parameter = nn.Parameter(value, requires_grad=tensor.requires_grad)
        parameter.__dict__.update(tensor.__dict__)  # marks that user code left on it
        return parameter
