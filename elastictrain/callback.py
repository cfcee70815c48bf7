"""The public callback: what a callback may change, what it may watch, what it keeps.

A callback does two kinds of things. **It shapes the step**: :meth:`Callback.configure` receives the frozen
:class:`~elastictrain.step_plan.StepPlan` before a generation is built and returns another one. **It watches**: the ``on_*``
hooks get a small immutable record each, never the trainer's insides. What it returns from :meth:`Callback.state_dict`
is part of the run's state.

A hook that raises ends the run as the user's own error would. Hooks run on every rank, in the order of the callbacks,
before the module's hook of the same moment; the trainer times each one. A hook that is not overridden costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from elastictrain.config import MeshShape
from elastictrain.step_plan import StepPlan


class RunInfo(NamedTuple):
    """The run as one generation sees it."""

    task: nn.Module  # the user's own module
    run_dir: str | None
    rank: int
    world_size: int
    generation: int
    mesh: MeshShape
    step: int  # global batches done
    samples: int  # samples used, over the whole run
    epoch: int
    max_steps: int | None
    max_epochs: int | None
    global_batch_size: int
    micro_batch_size: int
    num_slots: int
    optimizers: Sequence[Optimizer] = ()  # the user's own; none before the model is built
    device: str = "cpu"  # kind of device of every rank: "cpu", "cuda", …
    precision: str = "fp32"  # of forward and backward passes
    flops_per_sample: Callable[[], float | None] = lambda: None  # of forward and backward; known once a step has run


class Timings(NamedTuple):
    """Where this rank's host spent the steps since the last log step, validations and saves left out.

    Seconds over all of these steps. The parts do not overlap; what is left of ``total`` is the trainer's own.
    """

    num_steps: int
    samples: int  # used in them, over all ranks; so are ``tokens``
    tokens: int
    total: float
    data: float  # waiting for the next microbatch
    forward_backward: float
    optimizer: float
    communication: float  # waiting for gradients of other ranks behind the last backward pass
    callbacks: float  # hooks of elastictrain's callbacks
    logging: float  # log steps, without the above
    device: float  # of log steps: waiting until the accelerator has done what was asked of it
    hooks: Mapping[str, float]  # Lightning's hooks, by name
    queued: (
        int | None
    )  # at its end: microbatches that loader processes have ready; None: there are none, or it cannot be known


class StepInfo(NamedTuple):
    """One finished training step."""

    step: int  # global batches done, this one included
    samples: int  # samples used, over the whole run
    tokens: int  # tokens used by this process' view of the whole run; 0 where the task has none
    epoch: int
    loss: Tensor | None  # this rank's share of the global mean; summed over data-parallel ranks it is train/loss
    metrics: Mapping[str, float] | None  # what was logged at this step over all ranks; None between log steps
    progress: Mapping[str, Tensor]  # latest values logged with prog_bar=True
    epoch_steps: int | None  # steps in an epoch, where known
    grad_norm: Tensor | None = (
        None  # of all gradients, over the whole mesh, before clipping; None if not clipped by norm
    )
    seconds: float = 0.0  # since the step before it ended, without validations and saves in between; the host's clock
    timings: Timings | None = None  # for ``on_log``


class ValidationInfo(NamedTuple):
    """One finished validation."""

    step: int
    samples: int
    epoch: int
    metrics: Mapping[str, float]  # over all ranks


class SaveInfo(NamedTuple):
    """One committed checkpoint."""

    step: int
    path: str
    seconds: float
    num_bytes: int


class Callback:
    """Subclass this; override what you need, and give it to ``Trainer(callbacks=[…])`` or ``--callback module:Class``.

    One that prints how much the loss has fallen since the last log step, and keeps its memory in the checkpoints::

        class LossDrop(Callback):
            last = math.nan

            def on_step_end(self, info):
                if info.metrics is not None:  # a log step
                    print(info.step, self.last - info.metrics["train/loss"])
                    self.last = info.metrics["train/loss"]

            def state_dict(self):
                return {"last": self.last}

            def load_state_dict(self, state):
                self.last = state["last"]

    Attributes:
        state_prefix: where this callback's state lives in the flat state; ``callback.{ClassName}`` unless set.
        needs_flops: it asks :attr:`RunInfo.flops_per_sample`. Where no callback does, FLOPs are not counted.
    """

    state_prefix: str | None = None
    needs_flops: bool = False

    @property
    def name(self) -> str:
        return type(self).__name__

    def configure(self, plan: StepPlan) -> StepPlan:
        """Return the plan, changed where this callback shapes the step."""
        return plan

    def on_fit_start(self, info: RunInfo) -> None:
        """Once per call of ``fit``, before :meth:`on_generation_start`: the model is built and its state restored."""

    def on_generation_start(self, info: RunInfo) -> None:
        """The model is built and its state restored, this callback's own included; training goes on from here."""

    def on_step_end(self, info: StepInfo) -> None:
        """The optimizer has stepped. On the hot path: no ``.item()``, no network."""

    def on_log(self, info: StepInfo) -> Mapping[str, float | Tensor]:
        """Values to log with this step, by name. On log steps only, before :meth:`on_step_end`; a sync is fine here.

        Every rank is asked, so that a collective is possible; the values of the first one are logged. A name that the task
        logs itself stays the task's. ``info.metrics`` is not there yet.
        """
        return {}

    def on_validation_start(self, info: RunInfo) -> None:
        """A validation during training is about to run; :meth:`on_validation_end` or :meth:`on_exception` follows."""

    def on_validation_end(self, info: ValidationInfo) -> None:
        """A validation during training has ended."""

    def on_save(self, info: SaveInfo) -> None:
        """A checkpoint is committed."""

    def on_generation_end(self, info: RunInfo) -> None:
        """This generation ends: training is finished, interrupted, or membership changes."""

    def on_exception(self, error: BaseException) -> None:
        """Training raised ``error``; it goes on being raised afterwards."""

    def on_fit_end(self, info: RunInfo) -> None:
        """``fit`` is about to return."""

    def should_stop(self) -> bool:
        """Asked after every validation and epoch, and when a run is resumed; all ranks must answer the same."""
        return False

    def state_dict(self) -> Mapping[str, Any]:
        """What must survive: tensors (DTensors where sharded), numbers, text, lists, dicts."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what :meth:`state_dict` returned; called before :meth:`on_generation_start`."""
