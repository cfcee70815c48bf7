"""What the processes of one run hold, over its generations, and what is left of the run in the end.

Each agent of it is started with :data:`MARK` in its environment, which all of its processes inherit: so none can hide.
:class:`Counting` is a callback by which workers tell what only they know. What a process holds is looked at when the run is
calm, and goes up and down all the same: a connection is open for a moment, a save is being written, a rank that is alone
has no mesh. So generations of as many ranks are compared with each other: the least in the last third of them with the most
in the first third, once what is made once has been made. What grows is above that some day. Of a worker's memory it is what
is in use that counts: each of its threads may be the first in one of malloc's arenas, sixteen on two cores, and each of them
keeps two megabytes from then on.
"""

from __future__ import annotations

import ctypes
import gc
import os
from collections import defaultdict
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from elastictrain import Callback
from elastictrain.elastic.private import PrivateDir
from tests.checkpoint.nodes import memory_of
from tests.processes import FORKED

MARK = "ELASTICTRAIN_TEST_RUN"
MADE_ONCE = 3  # generations in which a process makes what it makes once: threads, caches, code that is loaded late
FEWEST = 9  # generations of as many ranks without which there are no thirds to speak of

# What a process may hold more of in its last generations than in its first ones, whatever their number.
SPARE = {
    "descriptors": 2,  # of a thing that is there or not: a log being written, the line to a spare
    "threads": 2,  # of a keeper: one for each connection, also of one whose buddy it has been until the next copy
    "images": 1 << 20,  # bytes, two or three of them: how many ranks share a state decides how large each one's is
    "meshes": 0,
    "modules": 0,
    "groups": 0,
}
# What it may hold more of for each generation: histories, which are what a run is asked about later.
SPARE_EACH = {
    "objects": 40,
    "in_use": 160 << 10,  # bytes: torch keeps up to 80 kB of each, none of it Python's
    "heap": 192 << 10,  # bytes: an allocator does not give everything back, and its arenas depend on chance
}


class Counting(Callback):
    """Writes down, as each generation begins in a process, how much of the last ones is still in it."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def on_generation_start(self, info: Any) -> None:
        from torch import nn
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.distributed_c10d import ProcessGroup

        gc.collect()
        objects = gc.get_objects()
        meshes = sum(isinstance(one, DeviceMesh) for one in objects)
        modules = sum(isinstance(one, nn.Module) for one in objects)
        groups = sum(isinstance(one, ProcessGroup) for one in objects)
        with open(Path(self.folder) / f"counts-{os.getpid()}", "a") as file:
            file.write(f"{info.world_size} {len(objects)} {meshes} {modules} {groups} {in_use()}\n")


class _Mallinfo(ctypes.Structure):
    """glibc's ``struct mallinfo2``."""

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names.split()]


def in_use() -> int:
    """Bytes that this process has been given by ``malloc`` and has not given back, in all arenas; 0 where glibc is none."""
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is None:
        return 0
    mallinfo.restype = _Mallinfo
    found = mallinfo()
    return int(found.uordblks + found.hblkhd)


@dataclass(frozen=True)
class Holding:
    """Of one process, at one moment. ``images`` counts shared memory for states, ``heap`` is memory of its own in bytes."""

    descriptors: int
    threads: int
    images: int
    heap: int

    @classmethod
    def of(cls, pid: int) -> Holding:
        """
        Raises:
            OSError: it has ended.
        """
        status = Path(f"/proc/{pid}/status").read_text()
        heaps = [int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("RssAnon:")]
        if not heaps:
            raise ProcessLookupError(f"process {pid} is a zombie")
        descriptors, threads = (len(os.listdir(f"/proc/{pid}/{what}")) for what in ("fd", "task"))
        return cls(descriptors, threads, memory_of(pid), heaps[0])


class Watch:
    """Over the processes of one run.

    Args:
        folder: where its workers have :class:`Counting` write.
        mark: the value of :data:`MARK` in their environment.
    """

    def __init__(self, folder: Path, mark: str) -> None:
        self._folder, self._mark = folder, mark
        self._seen: dict[int, list[tuple[int, Holding]]] = defaultdict(list)  # by pid, each with the number of ranks
        self._kinds: dict[int, str] = {}
        self._private: set[str] = set()  # directories in shared memory

    def look(self, training: Collection[int]) -> None:
        """The run is calm, and these workers train; a spare holds nothing yet."""
        num_ranks = len(training)
        for pid in self.processes():
            try:
                self._kinds[pid] = _kind(pid)
                if self._kinds[pid] == "worker" and pid not in training:
                    continue
                self._seen[pid].append((num_ranks, Holding.of(pid)))
                self._private.update(_private_dirs(pid))
            except OSError:
                self._seen.pop(pid, None)

    def processes(self) -> list[int]:
        """All that live, of this run."""
        found = []
        for name in filter(str.isdigit, os.listdir("/proc")):
            try:
                environment = Path(f"/proc/{name}/environ").read_bytes()
            except OSError:
                continue
            if f"{MARK}={self._mark}".encode() in environment.split(b"\0"):
                found.append(int(name))
        return sorted(found)

    # ---- what it came to -----------------------------------------------------------------------------------------------

    def left(self) -> list[str]:
        """What there is of the run once it is over; nothing, if all is well."""
        left = [f"process {pid}: {_kind(pid)}" for pid in self.processes()]
        PrivateDir().remove()  # as the next agent on this machine would, whose first thing is to tidy up
        return left + [path for path in sorted(self._private) if os.path.exists(path)]

    def leaks(self) -> list[str]:
        """What some process holds more and more of."""
        return [line for pid in self._seen for line in self._leaks_of(pid)]

    def summary(self) -> list[str]:
        """Of each kind, the process that was looked at most: in how many generations, what it held first and last."""
        longest: dict[str, int] = {}
        for pid, kind in self._kinds.items():
            if len(self._seen[pid]) >= len(self._seen[longest.get(kind, -1)]):
                longest[kind] = pid
        lines = []
        for kind, pid in sorted(longest.items()):
            grown = [f"{name} {first} → {last}" for name, first, last, _ in self._grown(pid)]
            lines.append(f"{kind}: {len(self._seen[pid])} generations: {', '.join(grown) or 'too few'}")
        return lines

    def _leaks_of(self, pid: int) -> list[str]:
        return [
            f"{self._kinds[pid]} {pid} holds more and more {name} over its generations: {first}, then {last},"
            f" and {most} would be fine: {[values for (key, _), values in self._series(pid).items() if key == name]}"
            for name, first, last, most in self._grown(pid)
            if last > most
        ]

    def _grown(self, pid: int) -> list[tuple[str, int, int, int]]:
        """``(what, first, last, most)``: the most in the first third, the least in the last one, and what that may be."""
        found, series = [], self._series(pid)
        for (name, num_ranks), values in series.items():
            settled = values[MADE_ONCE:]
            third = len(settled) // 3
            if len(values) >= FEWEST and (name != "heap" or ("in_use", num_ranks) not in series):
                first, last = max(settled[:third]), min(settled[-third:])
                spare = SPARE[name] if name in SPARE else SPARE_EACH[name] * len(settled)
                found.append((name, first, last, first + spare))
        return found

    def _series(self, pid: int) -> dict[tuple[str, int], list[int]]:
        """By what it is and the number of ranks."""
        series: dict[tuple[str, int], list[int]] = defaultdict(list)
        for num_ranks, row in [*((ranks, asdict(one)) for ranks, one in self._seen[pid]), *self._counts(pid)]:
            for name, value in row.items():
                series[name, num_ranks].append(value)
        return series

    def _counts(self, pid: int) -> list[tuple[int, dict[str, int]]]:
        """What :class:`Counting` has written in that process."""
        names, file = ("objects", "meshes", "modules", "groups", "in_use"), self._folder / f"counts-{pid}"
        lines = [
            [int(word) for word in line.split()] for line in (file.read_text().splitlines() if file.exists() else ())
        ]
        return [(num_ranks, dict(zip(names, values, strict=True))) for num_ranks, *values in lines]


def _kind(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        if Path(f"/proc/{pid}/comm").read_text().startswith(FORKED):
            return "worker"
    except OSError:
        return "one that has ended"
    module = words[words.index("-m") + 1] if "-m" in words else words[0]
    return {"elastictrain": "agent", "tests.forked": "agent"}.get(
        module, module.rpartition(".")[2].removesuffix("_main")
    )


def _private_dirs(pid: int) -> set[str]:
    found = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            path = os.readlink(f"/proc/{pid}/fd/{name}")
        except OSError:
            continue
        if path.startswith("/dev/shm/elastictrain-"):
            found.add("/".join(path.split("/")[:4]))
    return found
