"""What a keeper holds: images of snapshots, those of its own node and copies of another one's. Imports no torch.

An image counts once it is whole: hashed where it was staged, compared with those hashes where it is a copy. How many there
are is bounded: :data:`MAX_OWN` of each rank of this node, :data:`MAX_COPIES` of each rank of the other, and of
earlier starts nothing but the snapshot that the newest one has gone on from, until one of its own is whole on all ranks (and
copied). What a start has left that was not gone on from goes with the first snapshot of the next start.

On failure: a word of another process that cannot be true is a :class:`~elastictrain.channel.ChannelError`.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from elastictrain.channel import ChannelError
from elastictrain.checkpoint.marked import Marked, make_shared, whole_bytes

MAX_OWN = 3  # two that are kept, and one that is filled anew; whole as well in between
MAX_MANIFEST_BYTES = 1 << 28  # none comes near
MAX_COPIES = 2  # one that is whole, and one that arrives; both are whole in between
MAX_EARLIER = 1  # of an earlier start: own as well as copied, until this start has a snapshot that replaces it


@dataclass(frozen=True)
class About:
    """Which image of which snapshot.

    Args:
        snapshot: drawn for each snapshot, the same on all of its ranks.
        step: finished steps in it.
        start: the number of the start that has taken it, among all of the run.
        run, job: of :mod:`elastictrain.runfile` and :mod:`elastictrain.elastic.membership`.
        num_bytes: of this rank's image.
        notes: of rank 0.
    """

    snapshot: str
    step: int
    start: int
    run: str
    job: str
    rank: int
    world_size: int
    num_bytes: int
    notes: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, found: object) -> About:
        """
        Raises:
            ChannelError: it is none.
        """
        if not isinstance(found, dict):
            raise ChannelError("an image without a description")
        names = [text(found, name) for name in ("snapshot", "run", "job")]
        step, start, rank, num_bytes = (count(found, name) for name in ("step", "start", "rank", "num_bytes"))
        world_size, notes = count(found, "world_size", below=1 << 24), found.get("notes")
        if rank >= world_size or not isinstance(notes, dict) or not num_bytes:
            raise ChannelError(f"an image of rank {rank} of {world_size}, of {num_bytes} bytes")
        return cls(names[0], step, start, names[1], names[2], rank, world_size, num_bytes, notes)


def count(found: Mapping[str, Any], name: str, *, below: int = 1 << 48) -> int:
    """A number that another process has sent."""
    value = found.get(name)
    if type(value) is not int or not 0 <= value < below:
        raise ChannelError(f"{name} is {str(value)[:50]} and must be a count below {below}")
    return value


def text(found: Mapping[str, Any], name: str) -> str:
    value = found.get(name)
    if not isinstance(value, str) or len(value) > 1000:
        raise ChannelError(f"{name} is {str(value)[:50]} and must be a short text")
    return value


@dataclass(eq=False)
class Held:
    """One image. ``memory`` is it as long as its mark is ``mark``; ``manifest`` is there once it is whole."""

    about: About
    memory: Marked
    mark: int
    is_copy: bool
    manifest: bytes = b""

    @property
    def is_there(self) -> bool:
        return self.memory.mark == self.mark

    @property
    def is_whole(self) -> bool:
        return bool(self.manifest) and self.is_there

    def to_json(self) -> dict[str, Any]:
        manifest = {"bytes": len(self.manifest), "sha256": hashlib.sha256(self.manifest).hexdigest()}
        about = {**self.about.to_json(), "notes": {}}  # they may be large; only a start that restores it asks for them
        return {"about": about, "is_copy": self.is_copy, "manifest": manifest}


class Store:
    """All images of one keeper; any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: list[Held] = []  # oldest first
        self._marks = 0

    def add(self, held: Held) -> None:
        """One more; of an own rank the oldest go, should there be too many."""
        with self._lock:
            self._held.append(held)
            if not held.is_copy:
                same = [one for one in self._held if not one.is_copy and _line(one) == _line(held)]
                self._held = [one for one in self._held if one not in same[:-MAX_OWN]]

    def find(self, snapshot: str, rank: int) -> Held | None:
        """It, if it is whole; the own one before a copy."""
        with self._lock:
            fits = [one for one in self._held if (one.about.snapshot, one.about.rank) == (snapshot, rank)]
        return next((one for one in sorted(fits, key=lambda one: one.is_copy) if one.is_whole), None)

    def whole(self) -> list[Held]:
        with self._lock:
            return [one for one in self._held if one.is_whole]

    def drop(self, fits: Callable[[Held], bool]) -> None:
        with self._lock:
            self._held = [one for one in self._held if not fits(one)]

    def drop_older(self, about: About, *, base: str | None) -> None:
        """All that other starts have left, but for the snapshot ``base``, that this start has gone on from."""
        mine = about.run, about.start
        self.drop(lambda one: (one.about.run, one.about.start) != mine and one.about.snapshot != base)

    def drop_replaced(self) -> None:
        """Those whose memory has been filled with something else since."""
        self.drop(lambda one: not one.is_there)

    def room_for_copy(self, about: About) -> tuple[Marked, int]:
        """Memory for a copy that arrives, the oldest one's where there are enough; and the mark that will make it whole.

        Raises:
            ChannelError: the machine does not have so much memory.
        """
        with self._lock:
            self._marks += 1
            mine = [one for one in self._held if one.is_copy and _line(one) == _line_of(about)]
            while len(mine) >= MAX_COPIES:
                oldest = mine.pop(0)
                self._held.remove(oldest)
                oldest.memory.mark = 0
                if oldest.memory.num_bytes == about.num_bytes:
                    return oldest.memory, self._marks
        if whole_bytes(about.num_bytes) > (free := available_bytes()):
            raise ChannelError(f"a copy of {about.num_bytes} bytes, and {free} are free")
        return Marked(make_shared("elastictrain-copy", about.num_bytes), about.num_bytes, writable=True), self._marks


def _line(held: Held) -> tuple[str, int, int]:
    return _line_of(held.about)


def _line_of(about: About) -> tuple[str, int, int]:
    """What is bounded together: one rank of one start."""
    return about.run, about.start, about.rank


def available_bytes() -> int:
    """Memory of this machine that is free, or can be made so."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            found = next((line for line in file if line.startswith("MemAvailable:")), "")
        return int(found.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
