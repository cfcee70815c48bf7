"""Who takes part in a session: ranks, callbacks, and the module with its own view of the trainer.

On failure: what contradicts itself or cannot be honoured is a :class:`~elastictrain.errors.UsageError`; as much as can be
is found before the ranks have met.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from elastictrain.callback import Callback
from elastictrain.callbacks.registry import resolve_callback
from elastictrain.compat.callback_view import CallbackView
from elastictrain.compat.lightning import (
    Hooks,
    LightningDataModule,
    LightningModule,
    attach_log,
    call_hook,
    is_overridden,
    set_main_rank,
    split_callbacks,
)
from elastictrain.compat.self_log import make_log
from elastictrain.compat.supported import check_supported
from elastictrain.compat.trainer_view import TrainerView
from elastictrain.elastic.membership import Membership
from elastictrain.errors import UnsupportedError, UsageError
from elastictrain.loop import BATCH_HOOKS, StepRunner
from elastictrain.metrics.goodput import TimeBook
from elastictrain.metrics.published import Publisher
from elastictrain.parallel.compiled import missing_to_compile
from elastictrain.parallel.context import check_context
from elastictrain.parallel.float8 import missing_for_float8
from elastictrain.parallel.mesh import join
from elastictrain.parallel.zones import node_names
from elastictrain.piping import check_piped
from elastictrain.reporting import log_to_loggers
from elastictrain.rundir import RunDir
from elastictrain.session import Recovery, Session, Settings
from elastictrain.step_plan import StepPlan, apply_plan


def open_session(
    settings: Settings,
    task: Any,
    datamodule: Any,
    *,
    callbacks: Sequence[Any],
    loggers: list[Any],
    purpose: str,
    membership: Membership,
) -> Session:
    """Meet the other ranks and sort out who takes part.

    Raises:
        UsageError: the module is none, or callbacks contradict each other.
    """
    if isinstance(getattr(task, "_orig_mod", None), LightningModule):
        raise UsageError(
            f"the task is a compiled {type(task._orig_mod).__name__}: give the module itself, and compile its parts"
            " (self.net.compile()) in configure_model"
        )
    if not isinstance(task, LightningModule):
        raise UsageError(
            f"{type(task).__name__} is neither an elastictrain.Task nor a lightning.pytorch.LightningModule:"
            " derive it from one of them"
        )
    run_dir = RunDir(settings.run_dir) if settings.run_dir is not None else None
    if run_dir is not None and run_dir.is_memory and membership.world_size > 1:
        raise UsageError(
            f"run directory {run_dir}: memory:// is seen by one process only; use a path or an object store"
        )
    if datamodule is not None and not isinstance(datamodule, LightningDataModule):
        raise UsageError(
            f"datamodule is a {type(datamodule).__name__}, not a LightningDataModule: give loaders by name"
            " (train_dataloaders=…, val_dataloaders=…, dataloaders=…)"
        )
    ours, lightnings = split_callbacks(callbacks, Callback)
    plan = _plan(settings, ours)
    _check_layout(settings, task, plan, purpose)
    ranks = join(
        rank=membership.rank,
        world_size=membership.world_size,
        local_rank=membership.local_rank,
        mesh=settings.mesh,
        nodes=node_names(membership.node),
        is_over=lambda: membership.is_over,
        has_agent=membership.has_agent,
    )
    set_main_rank(ranks.rank)
    history, recovery = {}, None
    if purpose == "fit":  # told once; a second call in this process begins when it begins
        history, membership.history = membership.history, {}
        if "ended" in history:
            recovery = Recovery(
                membership.cause,
                history["ended"],
                int(history["reached"]),
                int(history["nodes"]) if "nodes" in history else None,
                is_planned="planned" in history,
                lost=membership.lost,
            )
    publishes_to = membership.publishes_to if purpose == "fit" else None
    return Session(
        settings=settings,
        task=task,
        datamodule=datamodule,
        membership=membership,
        ranks=ranks,
        callbacks=ours,
        lightning_callbacks=lightnings,
        loggers=loggers,
        plan=plan,
        run_dir=run_dir,
        times=TimeBook.begin(history),
        recovery=recovery,
        publisher=None if publishes_to is None else Publisher(publishes_to, rank=ranks.rank),
        purpose=purpose,
        stage={"fit": "train"}.get(purpose, purpose),
    )


def _check_layout(settings: Settings, task: LightningModule, plan: StepPlan, purpose: str) -> None:
    """
    Raises:
        UsageError: the mesh asks for what the module's step cannot have.
    """
    mesh, name = settings.mesh, type(task).__name__
    if mesh.cp != 1:
        check_context(task, plan, cp=mesh.cp, purpose=purpose)
    if purpose == "fit" and plan.compilation is not None and not task.automatic_optimization:
        raise UnsupportedError(
            f"Compile: {name} has manual optimisation, whose compiled gradients nobody could compare with eager ones: leave"
            " out Compile, or compile the parts yourself (self.part.compile() in configure_model)"
        )
    if purpose == "fit" and mesh.zero in (1, 2) and mesh.pp == 1 and not task.automatic_optimization:
        raise UnsupportedError(
            f"{name} has manual optimisation, where weights may change between two passes, and zero={mesh.zero} keeps"
            " gathered ones: use zero=3, or automatic optimisation"
        )


def _plan(settings: Settings, callbacks: Sequence[Callback]) -> StepPlan:
    """What a step is made of, as the callbacks have it."""
    plan = apply_plan(StepPlan(micro_batch_size=settings.micro_batch_size), [(c.name, c.configure) for c in callbacks])
    if settings.micro_batch_size not in (None, plan.micro_batch_size):
        raise UsageError(
            f"micro_batch_size={settings.micro_batch_size}, and a callback sets it to {plan.micro_batch_size}: keep one"
        )
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    if plan.compilation is not None and (missing := missing_to_compile(plan.compilation, device_type)):
        raise UsageError(f"Compile: {missing}; or leave out Compile")
    if plan.precision.compute == "fp8" and (missing := missing_for_float8()) is not None:
        raise UsageError(f'MixedPrecision("fp8"): {missing}: use "bf16"')
    return plan


def attach(session: Session, runner: StepRunner) -> None:
    """Make the module see this trainer, and see what it brings.

    Raises:
        UsageError: it brings something that cannot be honoured.
    """
    s = session
    loop: dict[str, Any] = {
        "backward": runner.manual.backward,
        "step": runner.optimizer_step,
        "clip": runner.clip,
    }
    s.view = TrainerView(s, **loop)
    s.task.trainer = s.view
    attach_log(s.task, make_log(s))
    _add_callbacks(s)
    check_supported(
        s.task,
        s.datamodule,
        s.lightning_callbacks,
        purpose=s.purpose,
        world_size=s.ranks.world_size,
        is_sharded=any(getattr(s.settings.mesh, axis) != 1 for axis in ("dp_shard", "cp", "tp", "pp")),
        has_loggers=bool(s.loggers),
    )
    if s.settings.mesh.pp != 1 and s.purpose == "fit":
        check_piped(s)
    s.hooks = Hooks(s.task, s.lightning_callbacks, CallbackView(s, log=log_to_loggers, **loop))
    if s.datamodule is not None:
        s.datamodule.trainer = s.view
        s.datamodule_hooks = frozenset(n for n in BATCH_HOOKS if is_overridden(n, s.datamodule, LightningDataModule))


def _add_callbacks(session: Session) -> None:
    """The module's own callbacks win over the trainer's of their class, as in Lightning; some are always there."""
    s = session
    returned = call_hook(s.task, "configure_callbacks")
    own: list[Any] = list(returned) if isinstance(returned, Sequence) else [returned]
    ours, lightnings = split_callbacks(own, Callback)
    replaced = {type(callback) for callback in own}
    s.callbacks = [*(c for c in s.callbacks if type(c) not in replaced), *ours]
    s.lightning_callbacks = [*(c for c in s.lightning_callbacks if type(c) not in replaced), *lightnings]
    s.plan = _plan(s.settings, s.callbacks)
    _check_layout(s.settings, s.task, s.plan, s.purpose)  # again, with what the module's own callbacks change
    there = [type(c).__name__ for c in [*s.callbacks, *s.lightning_callbacks]]
    for name, where, alike in (
        ("throughput-monitor", True, "ThroughputMonitor"),
        ("progress", s.ranks.is_main, "ProgressBar"),
    ):
        if s.purpose == "fit" and where and not any(alike in one for one in there):
            callback = resolve_callback(name)
            assert isinstance(callback, Callback)
            s.callbacks = [*s.callbacks, callback]
