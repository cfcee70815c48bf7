"""Frozen configuration that more than one room reads: the mesh, the checkpoints, and weights to begin with.

``ValueError``\\ s raised here are for users (:class:`~elastictrain.errors.UsageError`): they name the value and the
remedy, and come before any process group exists or any file is written.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from elastictrain.errors import UsageError

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")  # outermost first: tp on the fastest links
PP_SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBV", "DualPipeV")


@dataclass(frozen=True)
class MeshShape:
    """How many ranks each mesh axis has; every axis is there, size 1 included.

    Args:
        zero: how much of the state those of ``dp_shard`` share, see :class:`MeshConfig`; under a pipeline always 1.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    zero: int = 3

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(getattr(self, axis) for axis in AXES)

    @property
    def world_size(self) -> int:
        return math.prod(self.sizes)

    @property
    def dp(self) -> int:
        """Data-parallel degree: how many ranks share the slots of a global batch."""
        return self.dp_replicate * self.dp_shard

    def __str__(self) -> str:
        named = [f"{axis}={size}" for axis, size in zip(AXES, self.sizes, strict=True) if size > 1]
        named += [f"zero={self.zero}"] if self.zero != 3 and self.pp == 1 and self.dp_shard * self.cp > 1 else []
        return ", ".join(named) or "one rank"


@dataclass(frozen=True)
class MeshConfig:
    """The parallel layout a run asks for.

    ``MeshConfig("auto")`` (the default) lets the planner choose; otherwise name the axes, at most one of them ``-1``
    for "the rest of the ranks": ``MeshConfig(dp_shard=-1)``, ``MeshConfig(dp_replicate=2, dp_shard=2)``. The product of
    all sizes is the number of ranks.

    Args:
        dp_replicate: ranks (or groups of them) that each hold the whole model and share the slots of a global batch.
        dp_shard: ranks that share the slots too, and hold a part of every parameter, gradient and moment each (FSDP2).
        cp: ranks that share the tokens of each sample, by ``Task.context_parallel_plan``; they share the state too.
        tp: ranks that share the matrices of each layer, by ``Task.tensor_parallel_plan``; on the fastest links.
        pp: stages that the layers are cut into; needs a ``Task`` with ``forward`` and ``loss``.
        pp_schedule: in which order a pipeline computes its microbatches, one of :data:`PP_SCHEDULES`.
        pp_split: names of the modules that begin the pipeline's stages but the first; empty: balanced by parameters.
        zero: what the ranks of ``dp_shard`` share (the stages of ZeRO, Rajbhandari et al. 2020). 3: parameters, gradients
            and optimizer state; each layer is gathered where it is needed. 2: the same between steps, but within one all
            gathered parameters stay. 1: whole gradients stay within a step too, and are reduced once. None: 3, or 1 under
            a pipeline.
        topology: a file that says which nodes are near each other, see :mod:`elastictrain.parallel.zones`; ranks are then
            ordered so that the inner axes stay within a zone.
        device_memory: bytes of each rank's device that "auto" may reckon with; None: what there is, on a CPU the node's
            memory over its ranks.

    Raises:
        UsageError: an axis is not a positive number or -1, two axes are -1, "auto" is mixed with axes, the schedule is
            unknown, or ``zero`` is not a stage or has nothing to share.
    """

    preset: str | None = None
    _: KW_ONLY
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    pp_schedule: str = "1F1B"
    pp_split: tuple[str, ...] = ()
    zero: int | None = None
    topology: str | None = None
    device_memory: int | None = None

    def __post_init__(self) -> None:
        known = {name.lower(): name for name in (*PP_SCHEDULES, "ZBVZeroBubble")}
        schedule = known.get(str(self.pp_schedule).lower())
        if schedule is None:
            raise UsageError(f"pp_schedule={self.pp_schedule!r} is unknown: use one of {', '.join(PP_SCHEDULES)}")
        object.__setattr__(self, "pp_schedule", "ZBV" if schedule == "ZBVZeroBubble" else schedule)
        split: Any = self.pp_split
        if isinstance(split, str):
            raise UsageError(f"pp_split={split!r} is one name: give a tuple of names, ({split!r},)")
        object.__setattr__(self, "pp_split", tuple(split))
        if self.topology is not None:
            object.__setattr__(self, "topology", os.fspath(self.topology))
        if self.pp == 1 and (self.pp_split or self.pp_schedule != "1F1B"):
            raise UsageError("pp_schedule and pp_split are of a pipeline: add the axis, pp=2")
        self._check_zero()
        if self.preset is None and all(getattr(self, axis) == 1 for axis in AXES):
            object.__setattr__(self, "preset", "auto")
        if self.preset not in (None, "auto"):
            raise UsageError(f'mesh {self.preset!r} is unknown: use "auto" or axes such as dp_shard=2 ({_axes()})')
        if self.preset == "auto" and any(getattr(self, axis) != 1 for axis in AXES):
            raise UsageError(f'mesh "auto" chooses every axis: leave out {self._named()}, or leave out "auto"')
        if self.device_memory is not None and (self.preset != "auto" or self.device_memory < 1):
            raise UsageError(
                f'device_memory={self.device_memory} is what mesh "auto" may reckon with, in bytes, and the mesh is'
                f" {self.preset or self._named()}: leave it out"
            )
        for axis in AXES:
            size = getattr(self, axis)
            if not isinstance(size, int) or isinstance(size, bool) or (size < 1 and size != -1):
                raise UsageError(
                    f"mesh axis {axis}={size!r} must be a positive number, or -1 for the rest of the ranks"
                )
        if sum(getattr(self, axis) == -1 for axis in AXES) > 1:
            raise UsageError(f"mesh {self._named()}: only one axis may be -1")
        if self.cp != 1 and self.pp != 1:
            raise UsageError(f"mesh {self._named()}: cp and pp do not go together; use cp with dp_shard and tp")

    def _check_zero(self) -> None:
        if self.zero is None:
            return
        if self.zero not in (1, 2, 3) or isinstance(self.zero, bool):
            raise UsageError(
                f"zero={self.zero!r} is not a stage of ZeRO: use 1, 2 or 3 (docs/zero.md tells what each is)"
            )
        if self.dp_shard == self.cp == 1:
            raise UsageError(f"zero={self.zero} shares state over the mesh axis dp_shard: add dp_shard=-1")
        if self.pp != 1 and self.zero != 1:
            raise UsageError(
                f"zero={self.zero} with pp={self.pp}: a pipeline gathers the weights of a stage and reduces their gradients"
                " once a step, which is zero=1; use that, or no pp"
            )

    @classmethod
    def parse(cls, text: str) -> MeshConfig:
        """``"auto"`` or ``"dp_shard=2,pp=2,pp_schedule=GPipe,pp_split=blocks.2"``, as given to ``--mesh``; several cut
        points are joined by "+"."""
        if text.strip() in ("", "auto"):
            return cls("auto")
        axes: dict[str, Any] = {}
        for part in text.split(","):
            name, _, value = (piece.strip() for piece in part.partition("="))
            if name in ("pp_schedule", "pp_split"):
                axes[name] = value if name == "pp_schedule" else tuple(value.split("+"))
                continue
            if name not in (*AXES, "zero"):
                raise UsageError(f"--mesh {text}: {name!r} is not a mesh axis; the axes are {_axes()}")
            try:
                axes[name] = int(value)
            except ValueError:
                raise UsageError(f"--mesh {text}: {name}={value!r} is not a number; write {name}=2") from None
        return cls(**axes)

    @property
    def fit(self) -> tuple[int, bool]:
        """How many ranks it can have: a multiple of the first; or, where the second is True, the first and no more."""
        if self.preset == "auto":
            return 1, False
        sizes = [getattr(self, axis) for axis in AXES]
        return abs(math.prod(sizes)), -1 not in sizes

    def resolve(self, world_size: int, *, auto: MeshShape | None = None) -> MeshShape:
        """The sizes of all axes on ``world_size`` ranks; ``auto`` is what the planner chose.

        Raises:
            UsageError: the axes do not multiply to ``world_size``.
        """
        if self.preset == "auto":
            shape = auto or MeshShape(dp_replicate=world_size)
            assert shape.world_size == world_size, (shape, world_size)
            return shape
        sizes = {axis: getattr(self, axis) for axis in AXES}
        known = math.prod(size for size in sizes.values() if size != -1)
        rest = next((axis for axis, size in sizes.items() if size == -1), None)
        if rest is not None and world_size % known == 0:
            sizes[rest] = world_size // known
        elif rest is not None or known != world_size:
            raise UsageError(
                f"mesh {self._named()} needs {'a multiple of ' if rest else ''}{known} ranks and there are {world_size}:"
                f" change --nproc-per-node or --nnodes, or use dp_shard=-1 for as many as there are"
            )
        return MeshShape(**sizes, zero=self.zero or (3 if sizes["pp"] == 1 else 1))

    def _named(self) -> str:
        return ",".join(f"{axis}={getattr(self, axis)}" for axis in AXES if getattr(self, axis) != 1)

    def __str__(self) -> str:
        text = self.preset or self._named()
        if self.pp_schedule != "1F1B":
            text += f",pp_schedule={self.pp_schedule}"
        if self.zero is not None:
            text += f",zero={self.zero}"
        return f"{text},pp_split={'+'.join(self.pp_split)}" if self.pp_split else text


def _axes() -> str:
    return ", ".join(reversed(AXES))


@dataclass(frozen=True)
class CheckpointConfig:
    """When state goes to storage, and how many checkpoints stay there.

    Args:
        every_steps: save after every so many steps, beside ``every_seconds``; None: by time alone.
        every_seconds: save when so many seconds have passed since the last one. Time is looked at on log steps only,
            where all ranks already meet, so that they agree without a network round of its own. None turns it off; "auto"
            takes Daly's optimum from what saves turn out to cost and how often the run fails, and prints it.
        seconds_between_failures: what "auto" reckons with, for the whole job; None: 6 hours at first, and then what the
            run's own past says.
        snapshot_every: keep the state in memory after every so many steps: the newest two snapshots of each rank stay in a
            process of its own on each node, with a copy on another node: a restart loses less than storage could keep.
            Needs ``elastictrain run`` and a run directory. None: no snapshots.
        snapshot_wait: a step after a snapshot counts only once that is on another node, and training waits for it, so that
            no death of one node costs more than ``snapshot_every`` steps. False: training goes on, and where a copy takes
            longer than a step, what is trained meanwhile may be lost too.
        at_end: save when training ends.
        on_exception: save the last finished step when an exception ends training, where its state is still whole, all
            ranks have raised it, and no exchange of the step can be under way. Off, because the next start goes on from
            the newest checkpoint: a state in which training has just failed may fail there again.
        keep_last: keep the newest so many committed checkpoints and delete older ones after a commit; None keeps all.
        keep_every: besides those, keep those whose step is a multiple of this.
        keep_best: besides those, keep the best so many by ``best_metric``, a logged value such as "val/loss".
        best_mode: whether a "min" or a "max" of it is best.
        when_busy: what to do when a save is due while earlier ones are still being written. "queue": keep a second copy in
            memory, and wait where that is being written too. "skip": leave it out.
        on_failure: what to do when a save fails in the background. "warn": say so and go on. "raise": end the run.

    A run that is interrupted or preempted always saves, and waits until that is committed.

    Raises:
        UsageError: a number that is too small.
    """

    every_steps: int | None = None
    every_seconds: float | str | None = 300.0
    seconds_between_failures: float | None = None
    snapshot_every: int | None = None
    snapshot_wait: bool = False
    at_end: bool = True
    on_exception: bool = False
    keep_last: int | None = 3
    keep_every: int | None = None
    keep_best: int | None = None
    best_metric: str | None = None
    best_mode: str = "min"
    when_busy: str = "queue"
    on_failure: str = "warn"

    def __post_init__(self) -> None:
        if self.every_steps is not None and self.every_steps < 1:
            raise UsageError(f"checkpoint every_steps={self.every_steps} must be at least 1, or None")
        if isinstance(self.every_seconds, str) and self.every_seconds != "auto":
            raise UsageError(f'checkpoint every_seconds={self.every_seconds!r} must be a number, "auto" or None')
        for name in ("every_seconds", "seconds_between_failures"):
            value = getattr(self, name)
            if value is not None and value != "auto" and not value > 0:
                raise UsageError(f"checkpoint {name}={value} must be above 0, or None")
        if self.seconds_between_failures is not None and self.every_seconds != "auto":
            raise UsageError(
                f"checkpoint seconds_between_failures={self.seconds_between_failures} with every_seconds="
                f'{self.every_seconds} does nothing: use every_seconds="auto"'
            )
        if self.keep_last is not None and self.keep_last < 1:
            raise UsageError(f"checkpoint keep_last={self.keep_last} must be at least 1, or None to keep all")
        for name in ("keep_every", "keep_best", "snapshot_every"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise UsageError(f"checkpoint {name}={value} must be at least 1, or None")
        if self.snapshot_wait and self.snapshot_every is None:
            raise UsageError("checkpoint snapshot_wait=True waits for snapshots: give snapshot_every too")
        if (self.keep_best is None) != (self.best_metric is None):
            raise UsageError(
                f"checkpoint keep_best={self.keep_best} and best_metric={self.best_metric!r} go together: give both"
            )
        if self.best_mode not in ("min", "max"):
            raise UsageError(f'checkpoint best_mode={self.best_mode!r} is unknown: use "min" or "max"')
        if self.when_busy not in ("queue", "skip"):
            raise UsageError(f'checkpoint when_busy={self.when_busy!r} is unknown: use "queue" or "skip"')
        if self.on_failure not in ("warn", "raise"):
            raise UsageError(f'checkpoint on_failure={self.on_failure!r} is unknown: use "warn" or "raise"')


@dataclass(frozen=True)
class Weights:
    """Begin a new run with the weights of another one's checkpoint, and with nothing else of it.

    Args:
        checkpoint: path or URL of a checkpoint, or of a run directory: its newest.
        rename: prefixes of names in the checkpoint, and what stands in their place here, such as ``{"net.": "backbone."}``;
            the longest that fits a name. ``""`` fits all.
        strict: refuse names that only the checkpoint or only this model has. False leaves both as they are, and says so.
        cast: convert values of another dtype. False refuses them.

    A tensor of another shape is always refused: rename it to something that this model does not have, and use
    ``strict=False``.
    """

    checkpoint: str
    _: KW_ONLY
    rename: Mapping[str, str] = field(default_factory=dict)
    strict: bool = True
    cast: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.checkpoint, (str, os.PathLike)) or not os.fspath(self.checkpoint):
            raise UsageError(f"Weights({self.checkpoint!r}): name a checkpoint or a run directory")
        if not isinstance(self.rename, Mapping) or not all(
            isinstance(text, str) for pair in self.rename.items() for text in pair
        ):
            raise UsageError(
                f"Weights(rename={self.rename!r}) must give a prefix for each prefix, such as {{'net.': ''}}"
            )

    def named_here(self, name: str) -> str:
        """What a name in the checkpoint is called in this model."""
        fits = [prefix for prefix in self.rename if name.startswith(prefix)]
        if not fits:
            return name
        longest = max(fits, key=len)
        return self.rename[longest] + name.removeprefix(longest)
