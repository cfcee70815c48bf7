"""The whole state of a run as one flat dict, and back.

:func:`collect` is what every checkpoint holds: model, optimizers, schedulers, scaler, counters, seed, data position,
callbacks, running metrics. :class:`Restored` gives it back in two parts, because optimizers and data are built later than
the model.

On failure: a checkpoint that does not fit (another model, another optimizer, other data) is refused by name before the
tensors in question are touched. One that is damaged is a :class:`~elastictrain.checkpoint.DamagedError` on every rank, also
where only one of them has read the damaged bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor

from elastictrain.callback import Callback
from elastictrain.checkpoint import CheckpointReader, DamagedError
from elastictrain.compat.torchmetrics import load_metric_state, metric_state
from elastictrain.errors import CheckpointError, ElasticTrainError, UnsupportedError
from elastictrain.parallel.buffers import agree_on_buffers
from elastictrain.rundir import first_line
from elastictrain.session import Session
from elastictrain.state import (
    FlatState,
    TensorSpec,
    check_entries,
    load_optimizer,
    model_state,
    optimizer_state,
    optimizer_targets,
    pack,
    parameter_names,
    unpack,
)

T = TypeVar("T")

_ELSEWHERE = {
    "optimizer_states": "it is restored by name, once the optimizers are there",
    "lr_schedulers": "it is restored once the schedulers are there",
    "callbacks": "each callback has its own state_dict and load_state_dict",
    "loops": "the trainer keeps its position itself",
}


def collect(session: Session) -> tuple[FlatState, dict[str, Any]]:
    """The flat state, equal on all ranks but for shards, and the values that only this rank knows. A collective."""
    s = session
    agree_on_buffers(s.task, s.mesh)
    stages = Stages(s)
    flat = stages.model()
    names = stages.parameter_names()
    for i, optimizer in enumerate(s.optimizers):
        flat.update(optimizer_state(i, optimizer, names))
    for i, config in enumerate(s.schedulers):
        flat.update(pack(f"scheduler.{i}", config.scheduler.state_dict()))
    if s.scaler is not None:
        flat.update(pack("trainer.scaler", s.scaler.state_dict()))
    c = s.counters
    for name in ("step", "global_step", "samples", "tokens", "epoch", "seconds"):
        flat[f"trainer.{name}"] = getattr(c, name)
    flat["trainer.seed"] = s.settings.seed
    flat.update(pack("trainer.rounds", s.rounds))
    flat.update(s.chosen.feed.state())
    for prefix, callback in _callbacks(s):
        for key, value in callback.state_dict().items():
            key = stages.first(key)
            if isinstance(value, Tensor):
                flat[f"{prefix}.{key}"] = value.detach()
            else:
                flat.update(pack(f"{prefix}.{key}", value))
    if kept := {c.state_key: state for c in s.lightning_callbacks if (state := c.state_dict())}:
        flat.update(pack("callback.lightning", kept))
    if s.datamodule is not None and (kept := s.datamodule.state_dict()):
        flat.update(pack("trainer.datamodule", kept))
    flat.update(_checkpoint_hooks(s))
    flat.update(s.logbook.state(s.mesh.gather))
    metrics = metric_state(s.task, world_size=s.ranks.world_size)
    flat.update(metrics if s.mesh.shape.pp == 1 else s.mesh.from_first(metrics))  # the last stage has them
    return flat, {**s.chosen.feed.local_state(), **stages.values(flat)}


class Stages:
    """Under which names this rank's pipeline stages keep what they hold; without a pipeline every name is its own."""

    def __init__(self, session: Session) -> None:
        self._session, self._pipeline = session, session.built.pipeline

    def first(self, name: str) -> str:
        """A tied weight is kept under the first of its names in the whole model, which may be on another stage."""
        return name if self._pipeline is None else self._pipeline.names.first(name)

    def model(self) -> FlatState:
        flat = model_state(self._session.task)
        if self._pipeline is None:
            return flat
        return {f"model.{self.first(name.removeprefix('model.'))}": value for name, value in flat.items()}

    def parameter_names(self) -> dict[Tensor, str]:
        names = parameter_names(self._session.task)
        return names if self._pipeline is None else {p: self.first(name) for p, name in names.items()}

    def values(self, flat: FlatState) -> dict[str, Any]:
        """What is no tensor and only this stage knows; rank 0 writes the first rank's."""
        mesh = self._session.mesh
        if mesh.pp_rank == 0 or (mesh.dp_rank, mesh.cp_rank, mesh.tp_rank) != (0, 0, 0):
            return {}
        prefixes = ("model.", "optim.", "pg.")
        return {n: value for n, value in flat.items() if n.startswith(prefixes) and not isinstance(value, Tensor)}

    def here(self, name: str) -> str | None:
        """What a name of the state is called here; None: it is another stage's."""
        if self._pipeline is None or name not in self._pipeline.names.state:
            return name
        return self._pipeline.here.get(name)

    def mine(self, saved: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
        """Without what only other stages hold."""
        if self._pipeline is None:
            return dict(saved)
        prefixes = ["model.", *(f"optim.{i}." for i in range(len(self._session.optimizers)))]
        prefixes += [f"{prefix}." for prefix, _ in _callbacks(self._session)]
        return {name: spec for name, spec in saved.items() if not any(self._is_foreign(name, p) for p in prefixes)}

    def _is_foreign(self, entry: str, prefix: str) -> bool:
        assert self._pipeline is not None
        if not entry.startswith(prefix):
            return False
        parts = entry.removeprefix(prefix).split(".")
        owners = (".".join(parts[:end]) for end in range(len(parts), 0, -1))  # the longest name that fits
        owner = next((name for name in owners if name in self._pipeline.names.state), None)
        return owner is not None and owner not in self._pipeline.here


def _callbacks(session: Session) -> list[tuple[str, Callback]]:
    """Our callbacks with the prefixes of their state; two of one class are told apart by their order."""
    found: list[tuple[str, Callback]] = []
    for callback in session.callbacks:
        prefix = callback.state_prefix or f"callback.{callback.name}"
        count = sum(p == prefix or p.startswith(f"{prefix}@") for p, _ in found)
        found.append((f"{prefix}@{count}" if count else prefix, callback))
    return found


class _Checkpoint(dict[str, Any]):
    """The checkpoint as ``on_save_checkpoint`` and ``on_load_checkpoint`` get it: what user code may read and add."""

    def __missing__(self, key: str) -> Any:
        if key in _ELSEWHERE:
            raise UnsupportedError(f"checkpoint[{key!r}] is not in the checkpoint that hooks see: {_ELSEWHERE[key]}")
        raise KeyError(key)


def _checkpoint(session: Session, *, epoch: int, global_step: int) -> _Checkpoint:
    s = session
    checkpoint = _Checkpoint(
        {
            "epoch": epoch,
            "global_step": global_step,
            "pytorch-lightning_version": _lightning_version(),
            "state_dict": s.task.state_dict(),
        }
    )
    for part in (s.task, s.datamodule):
        if part is not None and part.hparams:
            checkpoint[part.CHECKPOINT_HYPER_PARAMS_KEY] = dict(part.hparams)
    return checkpoint


def _checkpoint_hooks(session: Session) -> FlatState:
    """What ``on_save_checkpoint`` of the module and of Lightning's callbacks adds to a checkpoint, and changes in it."""
    s = session
    if "on_save_checkpoint" not in s.hooks:
        return {}
    checkpoint = _checkpoint(s, epoch=s.counters.epoch, global_step=s.counters.global_step)
    own_keys, own = set(checkpoint), dict(checkpoint["state_dict"])
    s.hooks("on_save_checkpoint", checkpoint)
    added = {key: value for key, value in checkpoint.items() if key not in own_keys}
    weights = checkpoint["state_dict"]
    if removed := [name for name in own if name not in weights]:
        raise UnsupportedError(
            f"on_save_checkpoint removed {removed[0]} from checkpoint['state_dict']: a checkpoint holds the whole model, so"
            " that any layout can load it; filter when you export instead"
        )
    if changed := {name: value for name, value in weights.items() if value is not own.get(name)}:
        added["state_dict"] = changed  # weight averaging puts its own there
    return pack("trainer.checkpoint", added) if added else {}


def _lightning_version() -> str:
    import lightning

    return str(lightning.__version__)


def together(session: Session, action: Callable[[], T]) -> T:
    """What one rank cannot read, no rank takes: after damage all of them take another checkpoint. A collective.

    Raises:
        CheckpointError: on every rank; a :class:`DamagedError` where all that went wrong is damage. A rank where it was
            neither raises its own error.
    """
    result: Any = None
    problem: Exception | None = None
    try:
        result = action()
    except Exception as error:
        problem = error
    problems = [one for one in session.ranks.gather(_problem(session.ranks.rank, problem)) if one is not None]
    if problem is not None and not isinstance(problem, CheckpointError):
        raise problem
    for is_damage, text in sorted(problems):
        raise (DamagedError if is_damage else CheckpointError)(text) from problem
    found: T = result
    return found


def _problem(rank: int, error: Exception | None) -> tuple[bool, str] | None:
    if error is None:
        return None
    text = str(error) if isinstance(error, ElasticTrainError) else f"rank {rank} cannot restore: {first_line(error)}"
    return isinstance(error, DamagedError), text


Telling = Callable[[str, CheckpointReader], AbstractContextManager[None]]  # while so much of it is read


class Restored:
    """A checkpoint on its way into a session.

    Args:
        open: a reader of it; on every rank.
        telling: around what may take long.

    Attributes:
        reader: once there is a model.
    """

    reader: CheckpointReader

    def __init__(
        self,
        session: Session,
        open: Callable[[], CheckpointReader],
        *,
        telling: Telling = lambda what, reader: nullcontext(),
    ) -> None:
        self._session, self._open, self._telling = session, open, telling
        self._flat: dict[str, Any] = {}

    @property
    def step(self) -> int:
        return int(self._flat["trainer.step"])

    def load_model(self) -> None:
        """Open it; weights, buffers, callbacks' states, and the module's ``on_load_checkpoint``. A collective."""
        s, stages = self._session, Stages(self._session)
        model = {name: tensor for name, tensor in stages.model().items() if isinstance(tensor, Tensor)}
        rest: FlatState = {}

        def fill() -> None:
            self.reader = self._open()
            prefixes = ("callback.", "trainer.", "metrics.", "scheduler.", "pg.")
            rest.update(self._plain(*prefixes) | self._callback_targets())
            check_entries(model, stages.mine(self.reader.tensors), of=["model."])
            with self._telling("model", self.reader):
                self.reader.load(model | rest)

        together(self._session, fill)
        self._flat.update(self.reader.values)
        self._flat.update(model | rest)
        for prefix, callback in _callbacks(s):
            if state := self._under(prefix):
                callback.load_state_dict(state)
        self._load_hooks()
        if "callback.lightning" in self._flat:
            states = unpack("callback.lightning", self._flat)
            for lightning_callback in s.lightning_callbacks:
                if lightning_callback.state_key in states:
                    lightning_callback.load_state_dict(states[lightning_callback.state_key])

    def load_rest(self) -> None:
        """Optimizers, schedulers, scaler, counters, data position, running metrics."""
        s = self._session
        stages = Stages(s)
        names, saved = stages.parameter_names(), stages.mine(self.reader.tensors)
        targets: FlatState = {}

        def fill() -> None:
            for i, optimizer in enumerate(s.optimizers):
                targets.update(optimizer_targets(i, optimizer, names, saved))
            check_entries(targets, saved, of=["optim."])
            with self._telling("optimizer's state", self.reader):
                self.reader.load(targets)

        together(self._session, fill)
        self._flat.update(targets)
        for i, optimizer in enumerate(s.optimizers):
            load_optimizer(i, optimizer, names, self._flat)
        for i, config in enumerate(s.schedulers):
            if f"scheduler.{i}" not in self._flat:
                raise CheckpointError(
                    f"the checkpoint {self.reader.url} has no scheduler {i}: saved with other schedulers"
                )
            config.scheduler.load_state_dict(unpack(f"scheduler.{i}", self._flat))
        if s.scaler is not None and "trainer.scaler" in self._flat:
            s.scaler.load_state_dict(unpack("trainer.scaler", self._flat))
        for name in ("step", "global_step", "samples", "tokens", "epoch"):
            setattr(s.counters, name, int(self._flat[f"trainer.{name}"]))
        s.counters.seconds = float(self._flat.get("trainer.seconds", 0.0))  # older checkpoints have none
        s.rounds = unpack("trainer.rounds", self._flat)
        s.chosen.feed.load_state({k: v for k, v in self._flat.items() if k.startswith("data.")})
        s.logbook.load_state(self._flat, s.task, is_main=s.mesh.data_rank == 0)
        load_metric_state(s.task, self._flat, is_main=s.mesh.data_rank == 0)
        self._flat.clear()

    def _plain(self, *prefixes: str) -> FlatState:
        """Whole tensors for saved entries that are not laid out over ranks."""
        return {
            name: torch.empty(spec.shape, dtype=spec.dtype)
            for name, spec in self.reader.tensors.items()
            if name.startswith(prefixes)
        }

    def _callback_targets(self) -> FlatState:
        """Tensors for callbacks' states: one that is named like a weight is laid out as that weight."""
        stages = Stages(self._session)
        weights = {stages.first(name): weight for name, weight in self._session.task.named_parameters()}
        saved = stages.mine(self.reader.tensors)
        targets: FlatState = {}
        for prefix, _ in _callbacks(self._session):
            for name, spec in saved.items():
                weight = weights.get(name.removeprefix(f"{prefix}."))
                if weight is not None and name.startswith(f"{prefix}.") and tuple(weight.shape) == spec.shape:
                    targets[name] = torch.empty_like(weight.detach(), dtype=spec.dtype)
                elif name.startswith(f"{prefix}."):
                    targets[name] = torch.empty(spec.shape, dtype=spec.dtype)
        return targets

    def _under(self, prefix: str) -> dict[str, Any]:
        """A callback's state: every entry right below its prefix."""
        state: dict[str, Any] = {}
        stages = Stages(self._session)
        for name, value in self._flat.items():
            if name.startswith(f"{prefix}.") and not name.endswith("#"):
                key = stages.here(name.removeprefix(f"{prefix}."))
                if key is not None:
                    state[key] = value if isinstance(value, Tensor) else unpack(name, self._flat)
        return state

    def _load_hooks(self) -> None:
        """Hooks that see the checkpoint, in Lightning's order. What they put in place of weights is loaded."""
        s, checkpoint = self._session, None
        if (
            "on_load_checkpoint" in s.hooks or "trainer.checkpoint" in self._flat
        ):  # it takes as long as reading a small one
            checkpoint = self._shown_to_module()
        if s.datamodule is not None and "trainer.datamodule" in self._flat:
            s.datamodule.load_state_dict(unpack("trainer.datamodule", self._flat))
        if checkpoint is not None:
            s.hooks.callbacks("on_load_checkpoint", checkpoint)

    def _shown_to_module(self) -> _Checkpoint:
        s = self._session
        counted = {name: self._flat[f"trainer.{name}"] for name in ("epoch", "global_step")}
        checkpoint = _checkpoint(s, **counted)
        own = dict(checkpoint["state_dict"])
        added = unpack("trainer.checkpoint", self._flat) if "trainer.checkpoint" in self._flat else {}
        checkpoint["state_dict"].update(added.pop("state_dict", {}))
        checkpoint.update(added)
        s.hooks.module("on_load_checkpoint", checkpoint)
        weights = checkpoint["state_dict"]
        if weights.keys() != own.keys() or any(value is not own[name] for name, value in weights.items()):
            s.task.load_state_dict(weights, strict=s.task.strict_loading)
        return checkpoint
