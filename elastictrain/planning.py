"""A task as the planner sees it: its parts, what they weigh, and what one microbatch of its data keeps.

Everything is measured on a copy without elements (:mod:`elastictrain.parallel.measure`), with the task's own optimizers,
data and forward pass. On failure: what cannot be measured is assumed (two moments for each parameter) or left out
(activations), and a note of the description says which and why.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle
from torch.utils.data import DataLoader, IterableDataset, default_collate

from elastictrain.compat.lightning import (
    LightningCallback,
    LightningModule,
    configure_optimizers,
    is_overridden,
    num_parameters,
)
from elastictrain.compat.supported import copies_the_model
from elastictrain.compat.torch import FakeTensorMode, hollow, tree_map
from elastictrain.data.choose import Sizes, slot_plan
from elastictrain.data.randomness import generators_kept
from elastictrain.data.slots import SlotPlan
from elastictrain.errors import UsageError
from elastictrain.parallel.build import configure
from elastictrain.parallel.context import context_trouble, num_tokens
from elastictrain.parallel.measure import Kept, State, activations, optimizer_state
from elastictrain.parallel.memory import Model
from elastictrain.parallel.parts import part_names, parts_of
from elastictrain.parallel.plans import read_plan, told_plan
from elastictrain.parallel.recompute import is_dear, recomputed_modules
from elastictrain.parallel.roles import Role, must_divide, roles
from elastictrain.parallel.shard import DTYPES
from elastictrain.parallel.units import block_names
from elastictrain.piping import pipe_trouble
from elastictrain.step_plan import Recompute, StepPlan
from elastictrain.task import Task

Source = Callable[[], Any]


class _Horizon:
    """Stands in for the trainer while optimizers and schedules are made: how long training is does not matter here."""

    estimated_stepping_batches = max_steps = 1000
    max_epochs = world_size = num_devices = num_nodes = accumulate_grad_batches = 1
    global_rank = local_rank = current_epoch = global_step = 0


def describe(
    task: LightningModule,
    plan: StepPlan,
    *,
    source: Source,
    global_batch_size: int | None,
    num_ranks: int,
    callbacks: Sequence[LightningCallback] = (),
) -> Model:
    """Measure a task whose modules are built and not laid out yet.

    Args:
        source: gives its training data.
        callbacks: Lightning's; they may have something that a layout cannot honour.
        num_ranks: that would share a global batch whose number of slots is not given.
    """
    notes: list[str] = []
    names = part_names(task)
    styles, why = _tensor_plan(task)
    found = roles(task, styles)
    with generators_kept(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = _measure_optimizers(task, notes)
        batch, slots = _sample(task, plan, source, global_batch_size, num_ranks, notes)
        kept = None if batch is None else _measure_activations(task, plan, batch, names, found, notes)
    return Model(
        parts=tuple(parts_of(task, names, found, state, kept)),
        num_slots=None if slots is None else slots.num_slots,
        compute_itemsize=None if plan.precision.compute == "fp32" else DTYPES[plan.precision.compute].itemsize,
        recompute=plan.recompute is not None,
        knows_activations=kept is not None,
        num_tokens=num_tokens(task, batch),
        must_divide=must_divide(task, found),
        refused=_refused(task, plan, slots, callbacks, no_tensor_plan=why),
        notes=tuple(notes),
    )


def build_hollow(make: Callable[[], LightningModule]) -> LightningModule:
    """A task without weights, where its code allows that; with them otherwise."""
    try:
        with torch.device("meta"):
            task = make()
    except Exception:  # it needs values: if it is the code's own fault, the ordinary way shows it again
        task = make()
    if is_overridden("setup", task, LightningModule):
        task.setup(stage="fit")
    if is_overridden("configure_model", task, LightningModule):
        configure(task, task.configure_model, defer=True, seed=0)
    return task


def task_source(task: LightningModule) -> Any:
    """The training data that the task itself has."""
    if isinstance(task, Task) and not is_overridden("train_dataloader", task, Task):
        return task.train_dataset()
    return task.train_dataloader()


def _tensor_plan(task: LightningModule) -> tuple[Mapping[str, ParallelStyle], str | None]:
    """The styles of the task's modules by name, or why there are none."""
    try:
        if not told_plan(task):
            return {}, f"{type(task).__name__} has no tensor_parallel_plan()"
        return read_plan(task, 1).styles, None
    except UsageError as error:
        return {}, str(error)


def _refused(
    task: LightningModule,
    plan: StepPlan,
    slots: SlotPlan | None,
    callbacks: Sequence[LightningCallback],
    *,
    no_tensor_plan: str | None,
) -> dict[str, str]:
    """Axis -> why a start of this task with it would be refused."""
    refused: dict[str, str] = {}
    if copying := [c for c in callbacks if copies_the_model(c)]:
        refused |= dict.fromkeys(("dp_shard", "cp", "tp", "pp"), f"{type(copying[0]).__name__} copies the whole model")
    if no_tensor_plan is not None:
        refused["tp"] = no_tensor_plan
    elif plan.compilation is not None and plan.recompute is not None:
        refused["tp"] = "torch cannot compile blocks that are both split and recomputed"
    elif plan.precision.compute == "fp8":
        refused["tp"] = "layers that are split cannot compute in fp8"
    if (missing := context_trouble(task, plan)) is not None:
        refused["cp"] = missing
    if (trouble := pipe_trouble(task, callbacks, plan)) is not None:
        refused["pp"] = trouble.what
    elif not _has_loss(task):
        refused["pp"] = f"{type(task).__name__} has no forward(inputs) and loss(outputs, batch)"
    elif slots is not None and slots.global_batch_size % slots.micro_batch_size:
        refused["pp"] = f"micro_batch_size={slots.micro_batch_size} does not divide {slots.global_batch_size}"
    return refused


def _has_loss(task: LightningModule) -> bool:
    return isinstance(task, Task) and is_overridden("loss", task, Task)


# ---- measuring ------------------------------------------------------------------------------------------------------


def _hollow(task: LightningModule) -> tuple[LightningModule, FakeTensorMode]:
    made, mode = hollow(task)
    return detached(made), mode


def detached(copied: nn.Module) -> LightningModule:
    """A copy of a task that knows no trainer and logs nowhere, in training mode."""
    assert isinstance(copied, LightningModule)
    copied.__dict__["log"] = copied.__dict__["log_dict"] = lambda *args, **kwargs: None
    copied.trainer = _Horizon()  # type: ignore[assignment]
    return copied.train()


def _measure_optimizers(task: LightningModule, notes: list[str]) -> State | None:
    try:
        copied, _ = _hollow(task)
        optimizers, _ = configure_optimizers(copied, copied.configure_optimizers)
        state = optimizer_state(copied, optimizers)
        why = f"{type(optimizers[0]).__name__} needs values for a step" if state is None else ""
    except Exception as error:  # it is the user's code, without a trainer
        state, why = None, _line(error)
    if state is None:
        notes.append(f"optimizer state is assumed to be two moments of each parameter: {why}")
    return state


def _sample(
    task: LightningModule,
    plan: StepPlan,
    source: Source,
    global_batch_size: int | None,
    num_ranks: int,
    notes: list[str],
) -> tuple[Any, SlotPlan | None]:
    """A microbatch of the first sample over and over, and the slots of a global batch where they are known."""
    total = global_batch_size
    if total is None and isinstance(task, Task):
        total = task.batch_size
    slots: SlotPlan | None = None
    try:
        data = source()
        micro, collate = plan.micro_batch_size, default_collate
        if isinstance(data, DataLoader):
            micro, collate = micro or data.batch_size, data.collate_fn
            data = data.dataset
        elif isinstance(task, Task) and task.collate_fn is not None:
            collate = task.collate_fn
        if total is not None:
            slots = slot_plan(Sizes(total, micro), None, num_ranks)
            micro = slots.micro_batch_size
        item = next(iter(data)) if isinstance(data, IterableDataset) else data[0]
        return collate([item] * (micro or 1)), slots
    except Exception as error:
        notes.append(f"activations are not counted, there is no batch to measure: {_line(error)}")
        return None, slots


def _measure_activations(
    task: LightningModule,
    plan: StepPlan,
    batch: Any,
    names: Sequence[str],
    found: Mapping[str, Role],
    notes: list[str],
) -> list[Kept] | None:
    compute = None if plan.precision.compute == "fp32" else DTYPES[plan.precision.compute]
    blocks = block_names(task)
    recomputed = recomputed_modules(task, blocks, plan.recompute or Recompute()) if blocks or plan.recompute else []
    try:
        copied, mode = _hollow(task)

        def like(value: Any) -> Any:
            return torch.empty_like(value, device="cpu") if isinstance(value, torch.Tensor) else value

        with mode:
            batch = tree_map(like, batch)
        return activations(
            copied,
            mode,
            lambda module: _forward(module, batch),
            parts=names,
            recomputed=recomputed,
            keeps=is_dear if plan.recompute is not None and plan.recompute.mode == "selective" else None,
            roles=found,
            compute=compute,
        )
    except Exception as error:
        notes.append(f"activations are not counted, the forward pass needs values: {_line(error)}")
        return None


def _forward(task: nn.Module, batch: Any) -> Any:
    assert isinstance(task, LightningModule)
    if isinstance(task, Task) and _has_loss(task):
        return task.loss(task(task.inputs(batch)), batch)
    return task.training_step(*(batch, 0)[: num_parameters(task.training_step)])


def _line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
