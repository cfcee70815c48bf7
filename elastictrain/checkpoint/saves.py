"""Saves that are under way: staged by :mod:`elastictrain.checkpoint.staging`, written by the writer process, and known to
all ranks together.

What becomes of a save is known where ranks meet: :meth:`Saves.settle`.

On failure: what goes wrong after the planning, on whichever rank, ends the save on all of them: the others' writers are told
to stop, the attempt is removed once they have, and every rank gets the same :class:`Outcome`.
"""

from __future__ import annotations

import logging
import math
import posixpath
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elastictrain.checkpoint.arena import Arena
from elastictrain.checkpoint.background import COMMAND, WriterHere, WriterProcess
from elastictrain.checkpoint.footprint import MAX_SAVES
from elastictrain.checkpoint.manifest import step_name, tensors_json
from elastictrain.checkpoint.ranks import Failure, Ranks
from elastictrain.checkpoint.staging import Content, Staged
from elastictrain.rundir import RunDir

log = logging.getLogger(__name__)

TURN_SECONDS = 0.25  # how long a rank that waits listens to its writer before it asks the other ranks
LONG_SECONDS = 1.0  # that training waits for earlier saves: worth a line


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
        beat: called again and again while training waits for storage: that is no hang.
        must: the next one waits for earlier ones rather than being left out.
        patience: seconds that it waits for them at most; then it fails.
        failed_here: what this rank's writer has reported and nobody has read yet.
        num_skipped: saves that were left out because earlier ones were still being written.
        num_waited: those that waited for earlier ones instead, on this rank, and long enough to be said.
        waited: seconds that training waited for earlier ones, on this rank.
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
        self._started = 0.0
        self._numbers = 0
        self._errands: dict[int, str] = {}  # what rank 0's writer is asked to remove, by the number of the job
        self._leftovers: list[str] = []  # folders of failed attempts that resisted
        self.must = False
        self.beat: Callable[[], None] = lambda: None
        self.patience = math.inf
        self.failed_here: list[str] = []
        self.num_skipped = 0
        self.num_waited = 0
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

    def part(self) -> bool:
        """Whether this rank would have to wait. May only be called where the next state is about to be staged."""
        self._started = time.monotonic()
        self.look()
        return self._is_full

    def decide(self, parts: list[bool]) -> str | None:
        """The name of the attempt; None: it is left out, because an earlier one is still being written somewhere."""
        if self._skips and not self.must and any(parts):
            return None
        return f"{self._generation:06d}-{uuid.uuid4().hex[:12]}"

    def make_room(self, decided: str) -> None:
        began, waited = time.monotonic(), 0.0
        while self._is_full:
            if waited > self.patience:
                raise TimeoutError(f"earlier ones are still being written after {self.patience:g} s")
            self.look(TURN_SECONDS)
            self.beat()
            waited = time.monotonic() - began
        self.waited += waited
        if waited > LONG_SECONDS:
            self.num_waited += 1
            if self._ranks.rank == 0:
                log.warning(
                    "training waited %.1f s for earlier checkpoints to be written (%d waits so far):"
                    " storage is slower than saves come",
                    waited,
                    self.num_waited,
                )
        self.reached("planned")

    def take(self, decided: str, staged: Staged) -> None:
        save = self._begin(decided, staged.content.step)
        save.arena = staged.arena
        rank, content = self._ranks.rank, staged.content
        try:
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
                "values": staged.values,
                "commit": commit if rank == 0 else None,
            }
            self._writer.submit(job, save.arena)
            self.reached("submitted")
        except Exception as error:
            save.failure = Failure.of(rank, error)
            self._note(save)
        self.blocked = time.monotonic() - self._started

    def failed(self, decided: str, content: Content, error: Exception) -> None:
        save = self._begin(decided, content.step)
        save.failure = Failure.of(self._ranks.rank, error)
        self._note(save)

    def _begin(self, name: str, step: int) -> _Save:
        self._numbers += 1
        folder = posixpath.join("checkpoints", step_name(step), name)
        self._under_way.append(_Save(self._numbers, step, folder, self._started))
        return self._under_way[-1]

    def holds(self, arena: Arena) -> bool:
        return any(one.arena is arena and one.holds_arena for one in self._under_way)

    def forget(self, arena: Arena) -> None:
        self._writer.forget(arena)

    def reached(self, point: str) -> None:
        """Called as a save passes "planned", "staged", "submitted"; a test's way to interrupt there."""

    @property
    def _is_full(self) -> bool:
        return sum(one.holds_arena for one in self._under_way) >= (1 if self._skips else MAX_SAVES)

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

    def wait(self, *, seconds: float = math.inf) -> list[Outcome]:
        """Wait until no save is under way, but not much longer than so many seconds. Collective."""
        outcomes, turns = self.settle(), seconds / TURN_SECONDS  # as many on all ranks, whatever their clocks say
        while self._under_way and turns > 0:
            self._listen()
            self.beat()
            outcomes += self.settle()
            turns -= 1
        return outcomes

    def _listen(self) -> None:
        """Until this rank's part of all saves is over, or it is time to ask the others."""
        deadline, is_main = time.monotonic() + TURN_SECONDS, self._ranks.rank == 0
        while (left := deadline - time.monotonic()) > 0:
            done = [one.is_committed if is_main else one.is_written for one in self._under_way]
            if all(is_done or one.failure for is_done, one in zip(done, self._under_way, strict=True)):
                return
            self.look(left)

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
        """The writer ends when it is done."""
        self._writer.close()


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
