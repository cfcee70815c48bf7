"""A model cut into pipeline stages, and its training and evaluation.

In training a data-parallel rank's slots are the microbatches of a schedule of ``torch.distributed.pipelining``. Schedules
are given nothing but tensors between stages: which slot a call works on, every rank of the pipeline knows, because all of
them read the same slots. Losses are made in the last stage, divided so that their sum over all slots is the global mean.

Before the first step, and whenever a slot has another shape, one slot goes through the stages alone, because schedules
must know what passes between stages (:meth:`Pipeline._look`). The first time each stage is run twice, with other values in
place of what it should not see; a model whose result depends on them would be wrong when cut, and is refused.

Evaluation calls the user's step methods on every rank of the pipeline, with the same batch; in them ``self(...)`` goes
through the stages and gives the same outputs everywhere.

Under FSDP a stage's weights are gathered once a step and its gradients reduced once, however many slots a rank has; where
ranks differ in that, :meth:`Pipeline.train` makes up for it.

On failure: an exception of user code in a look or an evaluation is raised on every rank of the pipeline. Within a
schedule the other ranks wait for a peer that has failed, and end with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor

from elastictrain.compat.torch import is_view, tree_leaves
from elastictrain.data.slots import SlotPlan
from elastictrain.errors import UsageError
from elastictrain.parallel.buffers import RunningStats
from elastictrain.parallel.clipping import clip_grad_norm_
from elastictrain.parallel.mesh import Mesh
from elastictrain.parallel.placing import Placed
from elastictrain.parallel.relay import Line, Message, random_state, set_random_state, value_of
from elastictrain.parallel.schedules import SPLIT_BACKWARD, check_microbatches, make_schedule
from elastictrain.parallel.sharing import Names, Sharing, sum_gradients, whole_names
from elastictrain.parallel.stages import (
    CutModel,
    Packed,
    copied,
    pack_value,
    unpack_value,
)
from elastictrain.parallel.units import Cut
from elastictrain.parallel.unused import Unused
from elastictrain.step_plan import Precision


class Job(NamedTuple):
    """A slot on its way through the pipeline."""

    slot: int  # its index in the global batch
    args: tuple[Any, ...]  # of forward
    shapes: Any  # of the whole batch
    random: Tensor | None  # the state of random numbers where the slot begins


class _Known(NamedTuple):
    """What a look at one shape of slots has shown about one stage."""

    received: Any  # the structure of what it receives
    inputs: tuple[Tensor, ...]  # like what it receives, without values
    outputs: tuple[Tensor, ...]  # like what it sends
    before: tuple[Any, ...]  # shapes of what the units before it return


Loss = Callable[[Any, int], Tensor]  # the outputs of the job with this number -> its part of the global mean


class Pipeline:
    """The stages of this rank.

    Make it from the whole model, before it has weights: the units of other stages are then never made.

    Args:
        task: the user's module; units of other stages are replaced in it.
        schedule: one of :data:`elastictrain.config.PP_SCHEDULES`.

    Attributes:
        names: of the whole model.
        here: by their names in the state, what this rank's stages hold, and its name here; once placed.
        placed: the stages with their weights.
        draws: does the model draw random numbers? None before the first step.
    """

    def __init__(self, task: nn.Module, cut: Cut, mesh: Mesh, *, schedule: str) -> None:
        assert mesh.device_mesh is not None
        self.cut, self.mesh, self.schedule = cut, mesh, schedule
        self.names: Names = whole_names(task, cut)
        self.draws: bool | None = None
        self._task, self._device = task, mesh.ranks.device
        self._group = mesh.device_mesh.get_group("pp")
        self._model = CutModel(task, cut, mesh.pp_rank)
        self._line = Line(cut, self._group, mesh.pp_rank, self._device)
        self._has_looked = False
        self._known: dict[Any, dict[int, _Known]] = {}  # by the shapes of a slot, for each of this rank's stages
        self._schedules: dict[Any, Any] = {}  # by shapes and number of microbatches
        self._jobs: Sequence[Job] = ()
        self._done: dict[int, int] = {}  # microbatches each stage has begun
        self._autocast: Callable[[], Any] = nullcontext
        self._loss: Loss | None = None
        self._has_drawn = False

    def check(self, plan: SlotPlan, *, num_slots: int) -> None:
        """Can the slots of a global batch be microbatches?

        Raises:
            UsageError: they differ in size, or are too few for the schedule.
        """
        if plan.global_batch_size % plan.micro_batch_size:
            raise UsageError(
                f"global_batch_size={plan.global_batch_size} in slots of {plan.micro_batch_size} leaves a smaller one, and"
                " the microbatches of a pipeline must be alike: choose a --micro-batch-size that divides"
                " --global-batch-size"
            )
        shape = self.mesh.shape
        check_microbatches(self.schedule, num_slots=num_slots, num_stages=self.cut.num_stages, pp=shape.pp, dp=shape.dp)

    # ---- weights -----------------------------------------------------------------------------------------------------

    def place(self, make: Callable[[nn.Module], None], *, precision: Precision) -> None:
        """Give the stages their weights with ``make``, and shard them over data-parallel ranks where there are several."""
        assert self.mesh.device_mesh is not None
        self.placed = Placed(self._model, self.names, self.mesh, make, precision)
        self.modules = self.placed.modules
        self._stats = {stage: RunningStats(module, self.mesh) for stage, module in self.modules.items()}
        # Halves of backward passes tell no hook about gradients.
        notices = self.placed.is_sharded and self.schedule not in SPLIT_BACKWARD
        self._unused = Unused(self.modules.values(), self.mesh) if notices else None
        self._sharing = Sharing(self._task, self.names, self.cut, self.mesh.device_mesh)
        self.here = {self.names.first(name): name for name in reversed(list(self._task.state_dict(keep_vars=True)))}
        self._task.__dict__["forward"] = self.forward

    # ---- evaluation --------------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The user's ``forward`` over all stages, with the same outputs on every rank of the pipeline; a collective."""

        def advance(stage: int, message: Message) -> Message:
            value, shapes = self._pass(stage, message, args, kwargs)
            return Message(pack_value(value, self._end(stage)), self._with(message, stage, shapes))

        return value_of(self._line.relay(advance))

    def _pass(self, stage: int, message: Message, args: Any, kwargs: Any, fill: Any = None) -> Any:
        """One stage on what the message brings."""

        def body(index: int, received: tuple[Tensor, ...]) -> Any:
            value = copied(unpack_value(message.value.structure, received))
            own_args, own_kwargs = copied((args, kwargs))
            return self._model.run(index, own_args, own_kwargs, value, before=message.units, fill=fill, watched=True)

        self.modules[stage].body = body
        return self.modules[stage](*message.value.tensors)

    def _end(self, stage: int) -> str:
        return self.cut.units[self.cut.stages[stage][-1]] if stage + 1 < self.cut.num_stages else "forward()"

    def _with(self, message: Message, stage: int, shapes: dict[int, Any]) -> tuple[Any, ...]:
        return (*message.units, *(shapes.get(unit) for unit in self.cut.stages[stage]))

    # ---- a look at one slot ------------------------------------------------------------------------------------------

    def _look(self, job: Job) -> None:
        """Learn what passes between stages; the first time, whether the model can be cut at all."""
        found: dict[int, _Known] = {}
        compares, self._has_looked = not self._has_looked, True
        buffers = [(buffer, buffer.clone()) for buffer in self._task.buffers()]
        state = random_state(self._device)

        def advance(stage: int, message: Message) -> Message:
            is_last = stage + 1 == self.cut.num_stages
            set_random_state(state, self._device)
            value, shapes = self._pass(stage, message, job.args, {})
            if compares and self.cut.stages[stage].start > 1:
                set_random_state(state, self._device)
                other, _ = self._pass(stage, message, job.args, {}, fill=_Noise(self._device))
                self._check_same(stage, value, other)
            packed = Packed(None, ()) if is_last else pack_value(value, self._end(stage))
            trains = any(p.requires_grad for p in self.modules[stage].parameters())
            after = Message(packed, self._with(message, stage, shapes), message.needs_grad or trains)
            outputs = [torch.empty((), device="meta", requires_grad=True)] if is_last else _like(after)
            found[stage] = _Known(message.value.structure, tuple(_like(message)), tuple(outputs), message.units)
            return after

        try:
            with torch.no_grad(), self._autocast():
                self._line.relay(advance)
        finally:
            set_random_state(state, self._device)
            with torch.no_grad():
                for buffer, kept in buffers:
                    buffer.copy_(kept)
        self._known[job.shapes] = found

    def _check_same(self, stage: int, value: Any, other: Any) -> None:
        pairs = zip(tree_leaves(value), tree_leaves(other), strict=True)
        if not all(_is_close(a, b) for a, b in pairs if isinstance(a, Tensor)):
            units = self.cut.stages[stage]
            raise UsageError(
                f"what {self.cut.units[units[-1]]} returns depends on a unit before {self.cut.units[units.start - 1]}, whose"
                " output forward() uses again further on (a skip connection across the cut): put both ends into one unit"
                " of pipeline_units(), cut elsewhere (pp_split), or use dp_shard instead"
            )

    # ---- training ----------------------------------------------------------------------------------------------------

    def train(self, jobs: Sequence[Job], loss: Loss, *, autocast: Callable[[], Any] = nullcontext) -> None:
        """Forward and backward of this data-parallel rank's slots; :meth:`finish` completes the gradients.

        Args:
            jobs: the slots; the same on every rank of the pipeline.
            loss: called on the last stage's rank.

        Raises:
            UsageError: the slots differ in shape, or the model is none that can be cut.
        """
        self._loss, self._autocast = loss, autocast
        groups = [list(group) for _, group in groupby(jobs, key=lambda job: job.shapes)]
        if len(groups) > 2 or (len(groups) == 2 and len(groups[1]) > 1):
            raise UsageError(
                f"slots of one global batch differ in shape ({_shapes(groups[0][0])} and {_shapes(groups[1][0])}): the"
                " microbatches of a pipeline must be alike; pad samples to one length in collate_fn, or use dp_shard"
            )
        turns, unknown = len(groups), [group[0] for group in groups if group[0].shapes not in self._known]
        looks = bool(unknown)
        if self.placed.is_sharded:  # gathering and reducing are collectives: as often on every rank
            turns, looks = self._most(turns, looks)
        with self.placed.gathered() if looks and self.placed.is_sharded else nullcontext():
            for job in unknown:
                self._look(job)
        for group in groups:
            self._run(group)
        for _ in range(turns - len(groups)):
            self.placed.idle()
        if self.draws is None and groups:
            flag = torch.tensor(float(self._has_drawn))
            dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._group)
            self.draws = bool(flag)

    def _most(self, turns: int, looks: bool) -> tuple[int, bool]:
        most = torch.tensor([turns, int(looks)])
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self.mesh.data_group)
        return int(most[0]), bool(most[1])

    def _run(self, group: list[Job]) -> None:
        """The schedule over slots of one shape."""
        known = self._known[group[0].shapes]
        key = (group[0].shapes, len(group))
        if (schedule := self._schedules.get(key)) is None:
            stages = [self._stage(stage, known[stage]) for stage in self._model.stages]
            schedule = self._schedules[key] = make_schedule(
                self.schedule, stages, len(group), pp=self.mesh.shape.pp, loss=lambda output, number: output
            )
        self._jobs, self._done = group, dict.fromkeys(self.modules, 0)
        for stage, module in self.modules.items():
            module.body = partial(self._train_one, known[stage])
        is_last = self.cut.owners[-1] == self.mesh.pp_rank
        try:
            schedule.step(target=torch.arange(len(group)) if is_last else None, return_outputs=False)
        except RuntimeError as error:
            if isinstance(error.__cause__, UsageError):
                raise error.__cause__ from None
            raise
        self._line.finish()

    def _stage(self, stage: int, known: _Known) -> PipelineStage:
        # Torch can put gradients of weights off only where each weight is used once, behind the stage's input. Elsewhere
        # they are made together with the input's, which is as right and leaves a bubble.
        module, uses = (
            self.modules[stage],
            Counter(id(p) for m in self.modules[stage].modules() for p in m.parameters(recurse=False)),
        )
        whole = bool(self.names.outside) or max(uses.values(), default=0) > 1
        whole |= stage > 0 and not any(t.requires_grad for t in known.inputs)
        return PipelineStage(
            module,
            stage,
            self.cut.num_stages,
            self._device,
            input_args=known.inputs,
            output_args=known.outputs,
            group=self._group,
            dw_builder=(lambda: lambda: None) if whole and self.schedule in SPLIT_BACKWARD else None,
        )

    def _train_one(self, known: _Known, stage: int, received: tuple[Tensor, ...]) -> Any:
        """The next microbatch of a stage."""
        number = self._done[stage]
        self._done[stage] += 1
        job, stats, is_last = self._jobs[number], self._stats[stage], stage + 1 == self.cut.num_stages
        value = copied(unpack_value(known.received, received))
        begin = partial(self._begin_drawing, stage, job) if self.draws is not False else None
        if begin is not None and stage == 0:
            begin()
        if stats:
            stats.before(job.slot)
        with self._autocast():
            outputs, _ = self._model.run(stage, copied(job.args), {}, value, before=known.before, on_receive=begin)
            if is_last:
                assert self._loss is not None
                outputs = self._loss(outputs, number)
        if stats:
            stats.after(job.slot)
        if begin is not None:
            self._end_drawing(stage)
        if is_last:
            return outputs
        sent = pack_value(outputs, self._end(stage))
        if [(t.shape, t.dtype) for t in sent.tensors] != [(t.shape, t.dtype) for t in known.outputs]:
            raise UsageError(
                f"{self._end(stage)} returns another shape for slot {job.slot} than before, of inputs of the same shape:"
                " what passes between pipeline stages must be alike; use dp_shard instead"
            )
        splits = self.schedule in SPLIT_BACKWARD  # detaches what was sent in place
        return tuple(t.clone() if splits and is_view(t) else t for t in sent.tensors)

    def _begin_drawing(self, stage: int, job: Job) -> None:
        """Random numbers go on where the previous stage has left them."""
        state = job.random if stage == 0 else self._line.receive_random(stage)
        assert state is not None
        set_random_state(state, self._device)
        self._before_drawing = state

    def _end_drawing(self, stage: int) -> None:
        if self.draws is None:
            self._has_drawn |= not torch.equal(random_state(self._device), self._before_drawing)
        if stage + 1 < self.cut.num_stages:
            self._line.send_random(stage)

    # ---- around a step -----------------------------------------------------------------------------------------------

    def start(self, num_slots: int) -> None:
        """A global batch of so many slots begins."""
        for stats in self._stats.values():
            stats.start(num_slots)

    def finish(self) -> None:
        """All ranks have done their slots: gradients of shared weights and running statistics are those of all.

        A collective of the pipeline's and of the data-parallel ranks.
        """
        if self._unused is not None:
            self._unused.finish()
        if self.placed.loose:
            sum_gradients(self.placed.loose, self.mesh.data_group)
        self._sharing.sum_gradients()
        for stats in self._stats.values():
            if stats:
                stats.finish()

    def clip_grad_norm_(self, parameters: Iterable[Tensor], max_norm: float) -> Tensor:
        """Clip by the norm of the gradients of all stages, and return it; a collective of the pipeline's ranks."""
        return clip_grad_norm_(
            parameters, max_norm, stages=self._group, counted_elsewhere=self._sharing.counted_elsewhere
        )


def _is_close(a: Tensor, b: Tensor) -> bool:
    a, b = (t.to_local() if isinstance(t, DTensor) else t for t in (a, b))
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-5, atol=1e-6, equal_nan=True)


class _Noise:
    """Fills what a stage should not look at, so that it shows when it does."""

    def __init__(self, device: torch.device) -> None:
        self._generator = torch.Generator(device).manual_seed(1)  # not the one that units draw from

    def __call__(self, empty: Tensor) -> Tensor:
        if empty.is_floating_point():
            return empty.normal_(0.0, 10.0, generator=self._generator)
        return empty.random_(0, 2, generator=self._generator)


def _like(message: Message) -> list[Tensor]:
    return [
        torch.empty(t.shape, dtype=t.dtype, device="meta", requires_grad=message.needs_grad and t.is_floating_point())
        for t in message.value.tensors
    ]


def _shapes(job: Job) -> str:
    return ", ".join(str(list(shape.shape)) for shape in job.shapes)
