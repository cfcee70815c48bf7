"""Saves that are under way: planned and staged here, written by the writer process, and known to all ranks together.

:meth:`Saves.begin` stops training for the planning round and one copy of the local state. Everything else is the writer's.
What becomes of a save is known where ranks meet: :meth:`Saves.settle`.

On failure: what goes wrong while planning is a :class:`~elastictrain.checkpoint.ranks.RoundFailed` on every rank, and
nothing has been written. What goes wrong later, on whichever rank, ends the save on all of them: the others' writers are
told to stop, the attempt is removed once they have, and every rank gets the same :class:`Outcome`.
"""

from __future__ import annotations

import json
import logging
import posixpath
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from elastictrain.checkpoint.arena import Arena
from elastictrain.checkpoint.background import COMMAND, WriterHere, WriterProcess
from elastictrain.checkpoint.image import Image
from elastictrain.checkpoint.manifest import step_name, tensors_json
from elastictrain.checkpoint.plan import Key, Planner, key_of, local_tensors
from elastictrain.checkpoint.ranks import Failure, Ranks
from elastictrain.errors import CheckpointError
from elastictrain.rundir import RunDir
from elastictrain.state import FlatState

log = logging.getLogger(__name__)

MAX_ARENAS = 2
TURN_SECONDS = 0.25  # how long a rank that waits listens to its writer before it asks the other ranks


@dataclass(frozen=True)
class Content:
    """What is saved, the same on every rank but for local shards and values."""

    step: int
    state: FlatState
    local_values: Mapping[str, Any]
    about: Mapping[str, Any]


@dataclass(frozen=True)
class Outcome:
    """How a save went, the same on every rank. ``failures`` is empty where it is committed."""

    step: int
    folder: str
    seconds: float
    num_bytes: int
    failures: tuple[Failure, ...]


@dataclass
class _Save:
    """One save of this rank."""

    number: int
    step: int
    folder: str
    started: float
    arena: Arena | None = None
    is_written: bool = False
    is_committed: bool = False
    num_bytes: int = 0
    failure: Failure | None = None

    @property
    def holds_arena(self) -> bool:
        return self.arena is not None and not (self.is_written or self.failure)


class Saves:
    """Of one manager.

    Args:
        command: of the writer process; None: the ordinary one.

    Attributes:
        failed_here: what this rank's writer has reported and nobody has read yet.
        num_skipped: saves that were left out because earlier ones were still being written.
        waited: seconds that training waited for earlier ones.
        blocked: seconds that training stood still for the last one.
    """

    def __init__(
        self, run_dir: RunDir, ranks: Ranks, *, generation: int, skips: bool, command: Sequence[str] | None = None
    ) -> None:
        self._run_dir, self._ranks, self._generation, self._skips = run_dir, ranks, generation, skips
        self._writer: WriterProcess | WriterHere = (
            WriterHere() if run_dir.is_memory else WriterProcess(command or COMMAND)
        )
        self._url = run_dir.path if run_dir.is_local else run_dir.url  # the writer may stand in another folder
        self._under_way: list[_Save] = []
        self._arenas: list[Arena] = []
        self._plan: tuple[Key, Image] | None = None
        self._numbers = 0
        self._errands: dict[int, str] = {}  # what rank 0's writer is asked to remove, by the number of the job
        self._leftovers: list[str] = []  # folders of failed attempts that resisted
        self.failed_here: list[str] = []
        self.num_skipped = 0
        self.waited = 0.0
        self.blocked = 0.0

    @property
    def writer_pid(self) -> int | None:
        return self._writer.pid

    @property
    def is_busy(self) -> bool:
        """Whether any save is under way; the same on every rank."""
        return bool(self._under_way)

    @property
    def is_writing(self) -> bool:
        """Whether this rank's writer still needs an image."""
        return any(one.holds_arena for one in self._under_way)

    @property
    def folders(self) -> list[str]:
        """Of the attempts that are under way."""
        return [one.folder for one in self._under_way]

    @property
    def has_news(self) -> bool:
        """Whether the other ranks should hear something from this one."""
        return any(one.failure is not None or one.is_committed for one in self._under_way)

    # ---- begin -------------------------------------------------------------------------------------------------------

    def begin(self, content: Content, *, must: bool) -> bool:
        """Stage this state and let it be written. Collective.

        Args:
            must: wait for earlier saves rather than leave this one out.

        Returns:
            False: it was left out, because an earlier one is still being written.

        Raises:
            RoundFailed: on every rank; nothing has been written.
        """
        started = time.monotonic()
        self.look()
        tensors = {name: value for name, value in content.state.items() if isinstance(value, Tensor)}
        local = local_tensors(tensors)
        values = {name: value for name, value in content.state.items() if name not in tensors}
        key: Key = ()

        def ready() -> tuple[bool, bool, Mapping[str, Any], Mapping[str, Any]]:
            nonlocal key
            for group in (values, content.local_values, {"about": content.about}):
                check_values(group)
            key = key_of(tensors, local)
            is_known = self._plan is not None and self._plan[0] == key
            return is_known, self._is_full, content.local_values, values if self._ranks.rank == 0 else {}

        def decide(
            parts: list[tuple[bool, bool, Mapping[str, Any], Mapping[str, Any]]],
        ) -> list[tuple[bool, str | None]]:
            _check_local_values([one for part in parts for one in part[2:]])
            name = f"{self._generation:06d}-{uuid.uuid4().hex[:12]}"
            if self._skips and not must and any(is_full for _, is_full, _, _ in parts):
                return [(False, None)] * len(parts)
            return [(all(is_known for is_known, *_ in parts), name)] * len(parts)

        is_known, name = self._ranks.round(ready, decide)
        if name is None:
            self.num_skipped += 1
            return False
        if not is_known:
            planner = Planner()
            self._plan = None
            plan = self._ranks.round(
                lambda: planner.local_plan(tensors, is_main=self._ranks.rank == 0), planner.global_plan
            )
            self._plan = (key, planner.image(plan, local))
        self._numbers += 1
        folder = posixpath.join("checkpoints", step_name(content.step), name)
        save = _Save(self._numbers, content.step, folder, started)
        self._under_way.append(save)
        self._hand_over(save, content, values, local)
        self.blocked = time.monotonic() - started
        return True

    def _hand_over(self, save: _Save, content: Content, values: Mapping[str, Any], local: Mapping[str, Tensor]) -> None:
        """Stage and submit. What goes wrong here is told when ranks meet, as what goes wrong in the writer is."""
        assert self._plan is not None
        rank, is_main = self._ranks.rank, self._ranks.rank == 0
        try:
            save.arena = self._free_arena(self._plan[1], pin=any(one.is_cuda for one in local.values()))
            self.reached("planned")
            save.arena.stage(local.__getitem__)
            self.reached("staged")
            commit = {"step": content.step, "generation": self._generation, "about": content.about}
            job = {
                "kind": "save",
                "number": save.number,
                "run_dir": self._url,
                "folder": save.folder,
                "rank": rank,
                "world_size": self._ranks.world_size,
                "num_bytes": save.arena.image.num_bytes,
                "tensors": tensors_json(save.arena.image.pieces),
                "values": {**(values if is_main else {}), **content.local_values},
                "commit": commit if is_main else None,
            }
            self._writer.submit(job, save.arena)
            self.reached("submitted")
        except Exception as error:
            save.failure = Failure.of(rank, error)
            self._note(save)

    def reached(self, point: str) -> None:
        """Called as a save passes "planned", "staged", "submitted"; a test's way to interrupt there."""

    @property
    def _is_full(self) -> bool:
        return sum(one.holds_arena for one in self._under_way) >= (1 if self._skips else MAX_ARENAS)

    def _free_arena(self, image: Image, *, pin: bool) -> Arena:
        waiting = time.monotonic()
        while self._is_full:
            self.look(TURN_SECONDS)
        self.waited += time.monotonic() - waiting
        used = [one.arena for one in self._under_way if one.holds_arena]
        for arena in [one for one in self._arenas if one not in used]:
            if arena.image == image:
                return arena
            self._arenas.remove(arena)
            arena.close()
        self._arenas.append(Arena(image, pin=pin))
        return self._arenas[-1]

    # ---- what becomes of them ----------------------------------------------------------------------------------------

    def look(self, timeout: float = 0.0) -> None:
        """Hear what this rank's writer has to say. No collective; costs next to nothing when nothing is under way."""
        if not self._under_way and not self._errands:
            return
        by_number = {one.number: one for one in self._under_way}
        for said in self._writer.hear(timeout):
            number, what = said["number"], said["is"]
            if number in self._errands:
                folder = self._errands.pop(number)
                if what == "failed":
                    log.warning("%s could not be removed (%s: %s)", folder, said["kind"], said["text"])
                    self._leftovers += [folder] if folder.startswith("checkpoints/") else []
            elif (save := by_number.get(number)) is None or save.failure is not None:
                continue
            elif what == "written":
                save.is_written = True
            elif what == "committed":
                save.is_committed, save.num_bytes = True, said["num_bytes"]
            else:
                save.failure = Failure(self._ranks.rank, said["kind"], said["text"], said["errno"])
                self._note(save)

    def _note(self, save: _Save) -> None:
        assert save.failure is not None
        if save.failure.kind != "Cancelled":
            self.failed_here.append(f"step {save.step}: {save.failure.kind}: {save.failure.text}")

    def settle(self) -> list[Outcome]:
        """What became of the saves that are over on all ranks. Collective."""
        self.look()
        if not self._under_way:
            return []

        def states() -> list[tuple[bool, bool, int, Failure | None]]:
            return [(one.is_written, one.is_committed, one.num_bytes, one.failure) for one in self._under_way]

        verdicts = self._ranks.round(
            states, lambda parts: [[_judge(one) for one in zip(*parts, strict=True)]] * len(parts)
        )
        outcomes = []
        for save, verdict in list(zip(self._under_way, verdicts, strict=True)):
            if isinstance(verdict, str):
                self._writer.tell(verdict, save.number)
            elif verdict is not None:
                num_bytes, failures = verdict
                self._under_way.remove(save)
                self._writer.over(save.number)
                seconds = time.monotonic() - save.started
                outcomes.append(Outcome(save.step, save.folder, seconds, num_bytes, failures))
                self._clean_up([save.folder] if failures else [])
        return outcomes

    def wait(self) -> list[Outcome]:
        """Wait until no save is under way. Collective."""
        outcomes = self.settle()
        while self._under_way:
            self._listen()
            outcomes += self.settle()
        return outcomes

    def _listen(self) -> None:
        """Until this rank's part of all saves is over, or it is time to ask the others."""
        self.linger(TURN_SECONDS)

    def linger(self, seconds: float) -> bool:
        """Wait until this rank's part of all saves is over, without the others; is all of it written?"""
        deadline, is_main = time.monotonic() + seconds, self._ranks.rank == 0
        while True:
            done = [one.is_committed if is_main else one.is_written for one in self._under_way]
            if all(is_done or one.failure for is_done, one in zip(done, self._under_way, strict=True)):
                return all(done)
            if (left := deadline - time.monotonic()) <= 0:
                return False
            self.look(min(left, TURN_SECONDS))

    def _clean_up(self, folders: list[str]) -> None:
        """Remove failed attempts, after all have stopped writing; those that resisted, too. Rank 0's writer does it."""
        again, self._leftovers = self._leftovers, []
        folders += again
        for folder in folders if self._ranks.rank == 0 else ():
            self._numbers += 1  # rank 0 alone counts further: no other rank's number is compared with it
            self._errands[self._numbers] = folder
            job = {"kind": "remove", "number": self._numbers, "run_dir": self._url, "folder": folder}
            self._writer.submit(job)
        self.look()

    def tidy(self, job: Mapping[str, Any]) -> None:
        """Let rank 0's writer delete what may go."""
        self._numbers += 1
        self._errands[self._numbers] = "old checkpoints"
        under_way = [self._run_dir.join(one.folder) for one in self._under_way]
        job = {"kind": "tidy", "number": self._numbers, "run_dir": self._url, "under_way": under_way, **job}
        self._writer.submit(job)

    def finish_errands(self) -> None:
        """Wait until what may go is gone."""
        while self._errands:
            self.look(TURN_SECONDS)

    def close(self) -> None:
        """The writer ends when it is done; the memory goes with it."""
        self._writer.close()
        for arena in self._arenas:
            arena.close()
        self._arenas.clear()


def _judge(ranks: Sequence[tuple[bool, bool, int, Failure | None]]) -> Any:
    """Of one save: ``(bytes, failures)`` where it is over, a word for the writers, or None."""
    (is_written, is_committed, num_bytes, failure), *others = ranks
    if is_committed:
        return num_bytes, ()
    failures = [one for *_, one in ranks if one is not None]
    if failures:
        is_over = failure is not None and all(written or failed for written, _, _, failed in others)
        real = tuple(one for one in failures if one.kind != "Cancelled") or tuple(failures)
        return (0, real) if is_over else "cancel"
    return "all written" if is_written and all(written for written, *_ in others) else None


def check_values(values: Mapping[str, Any]) -> None:
    """Everything that is no tensor must come back from JSON as it is.

    Raises:
        CheckpointError: names the entry that would not.
    """
    if not _is_kept(values):
        name = next(name for name, value in values.items() if not _is_kept(value))
        raise CheckpointError(
            f"the state's {name} is a {type(values[name]).__name__} that JSON cannot hold as it is:"
            " pack it (elastictrain.state.pack)"
        )


def _is_kept(value: Any) -> bool:
    try:
        return bool(json.loads(json.dumps(value, allow_nan=False)) == value)
    except (TypeError, ValueError, RecursionError):
        return False


def _check_local_values(all_values: Sequence[Mapping[str, Any]]) -> None:
    merged: dict[str, Any] = {}
    for values in all_values:
        for name, value in values.items():
            if merged.setdefault(name, value) != value:
                raise CheckpointError(f"two ranks give different values for {name}: name local values by rank or shard")
