"""What one generation's training works with. The loop, the evaluation and the checkpoints share it; nobody owns it.

The trainer fills it while it builds a generation, in the order of the fields.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from elastictrain.callback import Callback, RunInfo
from elastictrain.checkpoint.lease import Lease
from elastictrain.compat.lightning import (
    Hooks,
    LightningCallback,
    LightningDataModule,
    LightningModule,
    LightningOptimizer,
    LRSchedulerConfig,
)
from elastictrain.config import CheckpointConfig, MeshConfig, Weights
from elastictrain.data.choose import Chosen
from elastictrain.data.evaluation import EvalLoader
from elastictrain.elastic.membership import Membership
from elastictrain.errors import UnsupportedError
from elastictrain.metrics.earlier import Earlier
from elastictrain.metrics.goodput import TimeBook
from elastictrain.metrics.ledger import Ledger
from elastictrain.metrics.logbook import LogBook, Written
from elastictrain.metrics.published import Publisher
from elastictrain.metrics.record import Recorder
from elastictrain.parallel.build import Built
from elastictrain.parallel.mesh import Mesh, Ranks
from elastictrain.rundir import RunDir
from elastictrain.step_plan import StepPlan


@dataclass(frozen=True)
class Settings:
    """The trainer's arguments, checked."""

    run_dir: str | None
    max_steps: int | None
    max_epochs: int | None
    global_batch_size: int | None
    micro_batch_size: int | None
    mesh: MeshConfig
    checkpoint: CheckpointConfig
    seed: int
    val_every: int | None
    log_every: int
    resume: str | Weights


@dataclass
class Counters:
    """Where the run stands; all of it is in every checkpoint."""

    step: int = 0  # global batches done
    global_step: int = (
        0  # optimizer steps done, as Lightning counts them: more than one a step with manual optimisation
    )
    samples: int = 0
    tokens: int = 0
    epoch: int = 0
    seconds: float = 0.0  # of training, without what was lost; rank 0's


@dataclass(frozen=True)
class Recovery:
    """What the generation before has ended with: a failure, or a change that its nodes had agreed on.

    Args:
        cause: in words.
        ended: when, seconds since the epoch.
        reached: finished steps by then; -1 if none.
        nodes: that took part in it; None: not known.
        is_planned: nodes joined or left in good order, nothing failed.
        lost: host and pid of agents that were in it and are not in this one, though nobody had planned that.
    """

    cause: str
    ended: float
    reached: int
    nodes: int | None = None
    is_planned: bool = False
    lost: Sequence[tuple[str, int]] = ()


@dataclass
class Session:
    """One generation."""

    settings: Settings
    task: LightningModule
    datamodule: LightningDataModule | None
    membership: Membership
    ranks: Ranks
    callbacks: Sequence[Callback]
    lightning_callbacks: list[LightningCallback]
    loggers: list[Any]
    plan: StepPlan
    view: Any = None  # the trainer as Lightning modules see it
    run_dir: RunDir | None = None

    built: Built = field(init=False)
    hooks: Hooks = field(init=False)
    datamodule_hooks: frozenset[str] = frozenset()  # the batch hooks that the datamodule overrides
    optimizers: list[Optimizer] = field(default_factory=list)
    wrapped_optimizers: list[LightningOptimizer] = field(default_factory=list)
    schedulers: list[LRSchedulerConfig] = field(default_factory=list)
    scaler: torch.amp.GradScaler | None = None
    chosen: Chosen = field(init=False)
    load_data: Callable[[], None] = lambda: None  # fills ``chosen``, should somebody need it early
    train_data: Any = None  # as the user gave it
    val_data: Any = None  # of the running validation, test or prediction
    val_loaders: list[EvalLoader] = field(default_factory=list)
    recorder: Recorder | None = None  # rank 0 only
    lease: Lease | None = None  # rank 0 only
    ledger: Ledger | None = None  # the first rank of each node
    earlier: Earlier | None = None  # what the starts before this one spent; rank 0 asks
    publisher: Publisher | None = None  # where somebody asks the agent
    times: TimeBook = field(default_factory=TimeBook)  # where this node's time goes
    begun: list[dict[str, Any]] = field(default_factory=list)  # what this node's account began with, in the ledger
    is_first_start: bool = True  # of the run, as far as its ledger knows; rank 0 knows
    recovery: Recovery | None = None  # what this start recovers from
    source: str = ""  # of the state that it has begun with, in words; empty: of none
    needs_state: bool = False  # it cannot begin with the weights that the module was made with
    num_cut_short: int = 0  # earlier starts of this run that did not end in good order; rank 0 knows

    counters: Counters = field(default_factory=Counters)
    num_stepped: int = 0  # steps whose optimizer is done: one more than ``counters.step`` while that one is told of
    stage: str = "train"  # train, validate, test, predict
    purpose: str = "fit"  # what the user called: fit, validate, test, predict
    is_whole: bool = False  # the state is that after ``counters.step`` steps; not from the optimizer to the boundary
    has_begun: bool = False  # the module is given the batches of the step after those
    num_added: int = 0  # what the logbook had counted when the state was whole
    should_stop: bool = False  # a callback or the module asks to stop training
    is_last_step: bool = False  # the running global batch ends its epoch
    next_batch: int = 0  # the batch_idx behind it
    batch_idx: int = 0  # of the running microbatch
    batch: Any = None  # the running microbatch
    batch_size: int | None = None  # its number of samples, once somebody asked
    part_weight: float | None = None  # of the part of the microbatch that this rank has, where tasks weigh theirs
    loss: Tensor | None = None  # this rank's share of the global mean loss of the running step
    grad_norm: Tensor | None = None  # of all gradients of it before clipping; None where nothing was clipped by it
    somebody_idles: bool = False  # in the running turn some rank has nothing to compute
    seconds: list[float] = field(
        default_factory=lambda: [0.0, 0.0, 0.0, 0.0]
    )  # of all steps: waiting for data, forward and backward, optimizer, gradients of other ranks
    flops_per_sample: Callable[[], float | None] = lambda: None  # known once a step has run
    counted_flops: float | None = None  # the same, as it was counted, in this generation or an earlier one
    logbook: LogBook = field(default_factory=lambda: LogBook(training=True))
    rounds: dict[int, int] = field(
        default_factory=dict
    )  # by validation loader, over all passes: the step of step values
    pass_batches: int = 0  # of the running validation, test or prediction that this rank has begun
    epoch_batches: int = 0  # of all validations of the running epoch
    callback_metrics: dict[str, Tensor] = field(default_factory=dict)
    logged_metrics: dict[str, Tensor] = field(default_factory=dict)
    bar_metrics: dict[str, Tensor] = field(default_factory=dict)
    skip_backward: bool = False  # Lightning's SWA: a last epoch only for running statistics

    dataloader_idx: int | None = None  # of the running batch, where a validation has several loaders
    in_batch: bool = False  # a batch is running, or has just ended: metrics are those of steps, not of epochs
    epoch_left: bool = False  # the epoch has ended before its data, and another start goes on in it

    @property
    def device(self) -> torch.device:
        return self.ranks.device

    @property
    def mesh(self) -> Mesh:
        return self.built.mesh

    @property
    def accounts(self) -> bool:
        """Does this rank keep its node's account of time?"""
        return self.membership.local_rank == 0

    def account_for_now(self) -> None:
        """Everything by now goes into this node's account, and that into the ledger, if there are any."""
        if self.ledger is not None and self.accounts:
            c = self.counters
            self.times.settle()
            step = max(c.step, self.num_stepped)  # of one that is not whole yet the optimizer's part is done
            self.ledger.account(self.times, step=step, samples=c.samples, tokens=c.tokens, now=True)

    @property
    def has_data(self) -> bool:
        """Is ``chosen`` there yet?"""
        return "chosen" in self.__dict__

    @property
    def accumulation(self) -> int:
        """Slots in a full global batch."""
        return self.chosen.accumulation

    def reached(self) -> Counters:
        """Where training has ended, as Lightning counts: an epoch that was left counts as well."""
        return dataclasses.replace(self.counters, epoch=self.counters.epoch + self.epoch_left)

    def publish(self, written: Written) -> None:
        """Make logged values what the trainer's metrics are."""
        self.callback_metrics.update(written.callback)
        self.logged_metrics.update(written.log)
        self.bar_metrics.update(written.bar)

    def publish_averages(self) -> dict[str, Tensor]:
        """Epoch values over all ranks become the trainer's metrics, the same on every rank; a collective.

        Returns:
            those that loggers want.
        """
        mesh = self.mesh
        written = self.logbook.averages(
            self.task,
            mesh.gather,
            world_size=self.ranks.world_size,
            dataloader_idx=self.dataloader_idx,
            counts=mesh.counts,
        )
        if mesh.has_peers:  # one that only nearly computed the same must not stop, or lower its learning rate, alone
            written = mesh.from_first(written.on_host())
        self.publish(written)
        return written.log

    def set_accumulation(self, num_slots: int) -> None:
        """Lightning's GradientAccumulationScheduler changes how many of the loader's batches make a global batch.

        Raises:
            UnsupportedError: the slots are not the loader's batches, or several ranks share them.
        """
        if num_slots == self.accumulation:
            return
        if not self.chosen.by_microbatch or self.ranks.world_size > 1:
            raise UnsupportedError(
                f"accumulate_grad_batches={num_slots}: the global batch is fixed for the life of a run"
                f" ({self.chosen.plan.global_batch_size} samples); set global_batch_size instead"
            )
        self.chosen.feed.set_accumulation(num_slots)
        self.chosen = dataclasses.replace(self.chosen, accumulation=num_slots)

    def set_max_epochs(self, value: int) -> None:
        """Lightning's weight averaging adds an epoch for running statistics."""
        self.settings = dataclasses.replace(self.settings, max_epochs=value)

    def info(self) -> RunInfo:
        """The run as callbacks see it."""
        s, plan = self.settings, self.chosen.plan
        return RunInfo(
            task=self.task,
            run_dir=None if self.run_dir is None else self.run_dir.url,
            rank=self.ranks.rank,
            world_size=self.ranks.world_size,
            generation=self.membership.generation,
            mesh=self.built.mesh.shape,
            step=self.counters.step,
            samples=self.counters.samples,
            epoch=self.counters.epoch,
            max_steps=s.max_steps,
            max_epochs=s.max_epochs,
            global_batch_size=plan.global_batch_size,
            micro_batch_size=plan.micro_batch_size,
            num_slots=plan.num_slots,
            optimizers=tuple(self.optimizers),
            device=self.device.type,
            precision=self.plan.precision.compute,
            flops_per_sample=self.flops_per_sample,
        )
