"""What a node's agent says of its own time: when it began, what it does, and that it is still there.

Workers account for their node while they have the run's ledger open. What comes before that and behind it, and what a node
does that never trains because it stands by, only its agent knows. So each agent has one small object in the run directory,
``agents/NODE-….jsonl``, and writes its one line there again and again as long as it lives: every tenth of a second on disks,
more rarely in runs of many nodes, so that they all together write no more often than :data:`PER_SECOND`, and every minute on
object stores; and once more as the last thing that it does. Of an agent that is killed the last line stays: until then it
was there. :mod:`elastictrain.metrics.goodput` takes from it what no worker has told.

    {"event": "agent", "generation": 0, "node": …, "name": …, "host": …, "agent_pid": …, "from": …, "to": …, "beat": …,
     "phases": [[cause, since], …], "reached": …, "ended": …}

``beat``: so many seconds later there is another line. ``reached`` is how many steps the workers of the newest generation
had finished, -1 for none; ``ended``: this is the last line. ``generation`` is there as in every line of the ledger,
and means nothing.

Nothing is written before there is a run, and what was written is removed if the command turns out to be refused. Once there
are many of these objects, a later start puts their lines into one of the ledger's (``ledger.fold_agents``).

On failure: storage that does not answer is asked again, and that it does not is said once; at the end nobody waits for it
longer than :data:`PATIENCE`. What the node's workers account for does not depend on it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import threading
import time
import urllib.parse
import uuid
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from elastictrain import runfile
from elastictrain.errors import UsageError
from elastictrain.metrics.lines import Line, parse, read_objects
from elastictrain.rundir import RunDir, first_line

log = logging.getLogger(__name__)

FOLDER = "agents"
PER_SECOND = 50  # lines that all nodes together write
BEAT = 0.1  # seconds between two lines of one node at least
STORE_BEAT = 60.0  # the same on object stores
RETRY = 5.0  # seconds from a line that could not be written to the next try
PATIENCE = 10.0  # seconds, at the end
OLD = 3600.0  # seconds without a new line after which an agent is gone, whatever it was
_MOST = 64  # phases; of more the middle ones are told as part of their neighbours


def node_id(name: str | None, pid: int) -> str:
    """Tells a node's agent from all others in the ledger; ``name``: the node's own, else its host's."""
    return f"{name or socket.gethostname()}-{pid}"


class Presence:
    """This process' own. Its methods may be called from any thread and return at once, but for :meth:`close`.

    Args:
        name: the node's; None: its host's.
        began: when its time begins, seconds since the epoch; None: now.
        run_dir: the run's; None: not known yet, see :meth:`look_in`.
        num_nodes: as many share the run directory at least.
    """

    def __init__(
        self, *, name: str | None = None, began: float | None = None, run_dir: str | None = None, num_nodes: int = 1
    ) -> None:
        self._offset = time.time() - time.monotonic()  # a clock that is set must not break the sum
        host = socket.gethostname()
        node = node_id(name, os.getpid())
        self._about = {"node": node, "name": name or host, "host": host, "agent_pid": os.getpid()}
        self._file = f"{urllib.parse.quote(node, safe='')}-{uuid.uuid4().hex[:8]}.jsonl"
        self._began = self._now() if began is None else min(began, self._now())
        self._phases: list[tuple[str, float]] = [("startup", self._began)]
        self._run_dir = None if run_dir is None else RunDir(run_dir)
        self._told_in: str | None = None
        self._ask_at = 0.0
        self._place: RunDir | None = None  # once there is a run
        self._descriptor: int | None = None
        self._size = 0
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._stays = True
        self._fails = False
        self._thread = threading.Thread(target=self._run, name="elastictrain-presence", daemon=True)
        self.reached = -1
        self.num_nodes = num_nodes

    def __enter__(self) -> Presence:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(stays=not isinstance(error, UsageError))

    def doing(self, cause: str, *, since: float | None = None) -> None:
        """This is what the node does now, and since when. Costs nothing where it is no news."""
        if self._phases[-1][0] == cause:
            return
        with self._lock:
            since = self._now() if since is None else min(since, self._now())
            self._phases.append((cause, max(since, self._phases[-1][1])))
            if len(self._phases) > _MOST:
                del self._phases[_MOST // 2]

    def look_in(self, path: str) -> None:
        """Workers may say in that file, as ``{"run_dir": …}``, that they have opened the ledger, and where."""
        self._told_in = path

    def close(self, *, stays: bool = True) -> None:
        """The last line; with ``stays`` False none at all, since this was no part of any run."""
        if self._is_over.is_set() or not self._thread.is_alive():
            return
        self._stays &= stays
        self._is_over.set()
        self._thread.join(PATIENCE)
        if self._thread.is_alive():
            log.warning("%s does not answer: the end of this node's account is not told", self._place)

    def refused(self) -> None:
        """The command was: it is no part of the run that may be there."""
        self._stays = False

    # ---- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        due = 0.0
        while not self._is_over.wait(self._pace):
            if time.monotonic() < due:
                continue
            is_told = self._try(ended=False)
            if self._place is not None and not is_told:
                due = time.monotonic() + RETRY
            elif self._place is not None and not self._place.is_local:
                due = time.monotonic() + STORE_BEAT
        self._try(ended=True)
        if self._descriptor is not None:
            os.close(self._descriptor)

    @property
    def _pace(self) -> float:
        return max(BEAT, self.num_nodes / PER_SECOND)

    def _try(self, *, ended: bool) -> bool:
        try:
            if self._place is None:
                self._place = self._find()
            if self._place is None:
                return False
            if ended and not self._stays:
                self._remove(self._place)
            else:
                self._write(self._place, ended=ended)
        except Exception as error:  # another time
            say = log.debug if self._fails or self._place is None else log.warning
            say(
                "what this node does beside training cannot be written to %s (%s): of its time what its workers do not tell"
                " is missing; tried again",
                *(self._place, first_line(error)),
            )
            self._fails |= self._place is not None
            return False
        self._fails = False
        return True

    def _find(self) -> RunDir | None:
        """The run directory, once there is a run in it."""
        if self._told_in is not None and os.path.exists(self._told_in):
            with open(self._told_in, encoding="utf-8") as file:
                self._run_dir = RunDir(json.load(file)["run_dir"])
            self._told_in, self._ask_at = None, 0.0
        run_dir = self._run_dir
        if run_dir is None or run_dir.is_memory or (not run_dir.is_local and not self._is_time_to_ask()):
            return None
        return run_dir if runfile.NAME in run_dir.names() else None

    def _is_time_to_ask(self) -> bool:
        """Of an object store, which shall not be asked ten times a second."""
        now = time.monotonic()
        if not self._is_over.is_set() and now < self._ask_at:
            return False
        self._ask_at = now + STORE_BEAT
        return True

    def _write(self, place: RunDir, *, ended: bool) -> None:
        if not place.is_local:
            place.fs.pipe_file(place.join(FOLDER, self._file), self._line(ended=ended))
            return
        if self._descriptor is not None and not os.fstat(self._descriptor).st_nlink:
            os.close(self._descriptor)  # it was taken for past: this node was frozen for long, or a clock was set
            self._descriptor = None
        if self._descriptor is None:
            os.makedirs(place.join(FOLDER), exist_ok=True)
            self._descriptor = os.open(place.join(FOLDER, self._file), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        data = self._line(ended=ended)
        os.pwrite(self._descriptor, data, 0)
        self._size = max(self._size, len(data))

    def _remove(self, place: RunDir) -> None:
        with contextlib.suppress(FileNotFoundError):
            place.fs.rm_file(place.join(FOLDER, self._file))
        if place.is_local:
            with contextlib.suppress(OSError):  # others have theirs there
                os.rmdir(place.join(FOLDER))

    def _line(self, *, ended: bool) -> bytes:
        """As long as the longest so far: it replaces what is there."""
        with self._lock:
            phases = list(self._phases)
            line = {"event": "agent", "generation": 0, **self._about, "from": self._began, "to": self._now()}
        beat = self._pace if self._place is None or self._place.is_local else STORE_BEAT
        text = json.dumps({**line, "beat": beat, "phases": phases, "reached": self.reached, "ended": ended})
        return (text[:-1].ljust(self._size - 2) + "}\n").encode()

    def _now(self) -> float:
        return time.monotonic() + self._offset


# ---- reading -------------------------------------------------------------------------------------------------------


class Agents:
    """What all agents of a run say, for one who looks more than once."""

    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir = run_dir
        self._ended: dict[str, Line] = {}

    def read(self) -> list[Line]:
        return list(self.look().values())

    def look(self) -> dict[str, Line]:
        """By the names of their objects. A line that is being written is read once more, and then left out."""
        names = [name for name in self._run_dir.names(FOLDER) if name.endswith(".jsonl")]
        found = {name: self._ended[name] for name in names if name in self._ended}
        for _ in range(2):
            for name, data in self._read_all([name for name in names if name not in found]):
                lines, num_damaged = parse(data)
                if len(lines) == 1 and not num_damaged:
                    found[name] = lines[0]
        self._ended = {name: line for name, line in found.items() if line.get("ended") is True}
        return found

    def _read_all(self, names: list[str]) -> list[tuple[str, bytes]]:
        """But for those that were put into the ledger since they were listed."""
        try:
            return list(read_objects(self._run_dir, FOLDER, names))
        except FileNotFoundError:
            found = []
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    found.append((name, self._run_dir.read(FOLDER, name)))
            return found


def remove(run_dir: RunDir, names: list[str]) -> None:
    """Those objects, whose lines are in the ledger now; what cannot be removed is for another time."""
    for name in names:
        with contextlib.suppress(Exception):
            run_dir.fs.rm_file(run_dir.join(FOLDER, name))


def is_past(line: Line, *, now: float) -> bool:
    """Will its agent write no other one?"""
    return line.get("ended") is True or now - float(line["to"]) > OLD


def pieces(line: Mapping[str, Any]) -> list[tuple[float, float, str]]:
    """From, to and the cause of each phase, in order, without holes."""
    phases: list[Any] = line["phases"]
    ends = [since for _, since in phases[1:]] + [line["to"]]
    found, at = [], float(line["from"])
    for (cause, _), end in zip(phases, ends, strict=True):
        end = min(max(float(end), at), float(line["to"]))
        if end > at:
            found.append((at, end, str(cause)))
        at = end
    return found
