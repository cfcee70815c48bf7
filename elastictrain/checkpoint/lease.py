"""One job at a time in a run directory.

    lease/000003.json            who has taken it, as the fourth; created once, by a conditional put where the store has one
    lease/000003.beat-00000017   the holder's newest sign of life; another one every few seconds
    lease/000003.released        the holder has ended

Who wants the directory takes the next number. It may at once where the last holder has released it, belongs to the same
job (workers that an agent has started again), or was a process of this machine that is gone. Otherwise it watches for
:data:`SILENCE` seconds: a holder that gives a sign of life is alive, and the newcomer is refused; one that gives none has
died with its machine. Nobody's clock is compared with another's. Where a store has no conditional put, of two that take the
same number at the same moment the second one's name stays, and the first one sees it at its next sign of life.

On failure: a holder that was silent for so long (a frozen machine, a store out of reach) and finds that somebody has taken
the next number has lost the directory: :attr:`Lease.lost` says to whom, and the trainer ends, on all ranks, where
they next meet. Its checkpoints have folders
of their own, so nothing is mixed until then. Signs of life that cannot be written are a warning.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from elastictrain.checkpoint.storage import file_sizes, put, put_once, read_whole
from elastictrain.errors import UsageError
from elastictrain.rundir import RunDir, first_line

log = logging.getLogger(__name__)

FOLDER = "lease"
SILENCE = 30.0  # seconds without a sign of life after which a holder is taken for dead
BEAT = 8.0  # seconds between two signs of life
_NAME = re.compile(r"(\d{6})\.(json|released|beat-\d{8})")


@dataclass(frozen=True)
class Holder:
    """Who has taken a run directory. ``machine`` and ``born`` tell a process apart from a later one with its number."""

    job: str
    host: str
    pid: int
    machine: str
    born: str
    since: float
    command: str

    @classmethod
    def me(cls, job: str) -> Holder:
        command = shlex.join(sys.orig_argv)[:500]
        return cls(job, socket.gethostname(), os.getpid(), _machine(), _born(os.getpid()) or "", time.time(), command)

    @property
    def is_gone(self) -> bool:
        """A process of this machine that has ended; False where that cannot be told."""
        return bool(self.machine) and self.machine == _machine() and _born(self.pid) not in (None, self.born)

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"process {self.pid} on {self.host} (since {since})"


@dataclass(frozen=True)
class _Standing:
    number: int
    beat: str  # name of the newest sign of life; empty before the first
    is_released: bool
    holder: Holder | None  # None: what it wrote cannot be read


class Lease:
    """This job's hold on a run directory; rank 0 has it.

    Args:
        job: the same for all starts of one job.
        say: prints one line, should it have to wait.

    Attributes:
        lost: who has taken the directory away; None while it is held.
    """

    def __init__(self, run_dir: RunDir, *, job: str, say: Callable[[str], None]) -> None:
        self._run_dir, self._job, self._say = run_dir, job, say
        self._me = Holder.me(job)
        self._number: int | None = None
        self._beats = 0
        self._end = threading.Event()
        self._thread: threading.Thread | None = None
        self.lost: str | None = None

    def look(self) -> int:
        """Wait until it may be taken. Nothing is written.

        Returns:
            the number to take.

        Raises:
            UsageError: another job has it.
        """
        seen: tuple[int, str] | None = None
        deadline = 0.0
        while True:
            last = _standing(self._run_dir)
            if last is None:
                return 0
            holder = last.holder
            if last.is_released or (holder is not None and (holder.job == self._job or holder.is_gone)):
                return last.number + 1
            if seen is None:
                seen, deadline = (last.number, last.beat), time.monotonic() + SILENCE
                self._say(
                    f"run directory {self._run_dir} is held by {holder}: watching up to {SILENCE:g} s for a sign of life"
                )
            elif seen != (last.number, last.beat):
                raise UsageError(
                    f"run directory {self._run_dir} is in use by {holder}"
                    f"{'' if holder is None else ': ' + holder.command}: stop that job first, or choose another --run-dir"
                )
            elif time.monotonic() > deadline:
                return last.number + 1
            time.sleep(0.5)

    def take(self) -> None:
        """Take it, and give signs of life from now on.

        Raises:
            UsageError: another job has it.
        """
        content = json.dumps(asdict(self._me)).encode()
        while True:
            number = self.look()
            try:
                put_once(self._run_dir, f"{FOLDER}/{number:06d}.json", content)
            except FileExistsError:
                continue
            break
        self._number = number
        self._forget(before=number)
        self._thread = threading.Thread(target=self._live, name="elastictrain-lease", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Others may take it now."""
        if self._thread is None:
            return
        self._end.set()
        self._thread.join(BEAT)
        self._thread = None
        if self.lost is None:
            try:
                put(self._run_dir, f"{FOLDER}/{self._number:06d}.released", b"")
            except Exception as error:
                log.warning("%s could not be released (%s)", self._run_dir, first_line(error))

    def _live(self) -> None:
        is_told = False
        while not self._end.wait(BEAT):
            try:
                last = _standing(self._run_dir)
                if last is not None and self._number is not None and last.number > self._number:
                    self.lost = (
                        f"run directory {self._run_dir} was taken over by {last.holder} while this job gave no sign of life"
                        f" for {SILENCE:g} s: it ends here, the other one goes on"
                    )
                    return
                if last is not None and last.number == self._number and last.holder not in (None, self._me):
                    self.lost = (
                        f"run directory {self._run_dir} was taken by {last.holder} at the same moment: this job ends here,"
                        " the other one goes on"
                    )
                    return
                self._beats += 1
                put(self._run_dir, f"{FOLDER}/{self._number:06d}.beat-{self._beats:08d}", b"")
                self._drop(f"{self._number:06d}.beat-{self._beats - 1:08d}")
            except Exception as error:
                if not is_told:
                    log.warning("no sign of life in %s (%s)", self._run_dir, first_line(error))
                is_told = True

    def _forget(self, *, before: int) -> None:
        for name in file_sizes(self._run_dir, FOLDER):
            if (match := _NAME.fullmatch(name)) is not None and int(match[1]) < before:
                self._drop(name)

    def _drop(self, name: str) -> None:
        try:
            self._run_dir.fs.rm_file(self._run_dir.join(FOLDER, name))
        except Exception as error:  # one small object more
            log.debug("%s stays (%s)", name, error)


def _standing(run_dir: RunDir) -> _Standing | None:
    """The newest holder's; None where nobody ever was."""
    found: dict[int, list[str]] = {}
    for name in file_sizes(run_dir, FOLDER):
        if (match := _NAME.fullmatch(name)) is not None:
            found.setdefault(int(match[1]), []).append(match[2])
    numbers = [number for number, kinds in found.items() if "json" in kinds]
    if not numbers:
        return None
    number = max(numbers)
    holder: Holder | None = None
    try:
        holder = Holder(**json.loads(read_whole(run_dir, f"{FOLDER}/{number:06d}.json")))
    except (ValueError, TypeError, OSError):
        pass  # killed while it wrote; or gone by now, and the next look sees why
    beats = [kind for kind in found[number] if kind.startswith("beat-")]
    return _Standing(number, max(beats, default=""), "released" in found[number], holder)


def _machine() -> str:
    """This boot of this machine, and within it the space in which process numbers count; empty where unknown."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


def _born(pid: int) -> str | None:
    """When the process started, in ticks since boot; empty where it is gone or a zombie, None where it is hidden."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            fields = file.read().rsplit(")", 1)[1].split()
    except OSError:
        return None if _is_of_another_user(pid) else ""  # /proc may hide those (hidepid)
    return "" if fields[0] in "ZX" else fields[19]


def _is_of_another_user(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except OSError:
        pass
    return False
