"""JSON lines, back out of a folder of whole new objects.

An object is created once and never changed, so what has been read need not be read again. One that does not end with the
end of a line is still being written, or was cut when its writer died: it is looked at again the next time.

An object may stand for others: it begins with ``{"event": "instead", "names": […], "lines": n}``. It counts only if all of
its lines are there, and the others then count no longer, whether they are still there or not.

On failure: a line that is cut or damaged is passed over and counted. Storage that does not answer raises its own error.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elastictrain.rundir import RunDir

Line = dict[str, Any]

_decode = json.JSONDecoder().raw_decode  # without a look for spaces around, which nobody writes
INSTEAD = "instead"
_TRIES = 5  # to read objects before they are replaced
_TOGETHER = 64  # objects that are asked for at a time: enough for an object store, and not all of them in memory


def parse(data: bytes) -> tuple[list[Line], int]:
    """The JSON objects of an object's lines, and how many lines were none."""
    lines: list[Line] = []
    num_damaged = 0
    whole = data.decode(errors="replace")
    has_halves = "\\ud" in whole or "\\uD" in whole
    for text in whole.split("\n"):
        if not text:
            continue
        try:
            line, end = _decode(text)
            line = as_unicode(line) if has_halves else line
        except (ValueError, RecursionError):
            line, end = None, 0
        if isinstance(line, dict) and end == len(text):
            lines.append(line)
        else:
            num_damaged += 1
    return lines, num_damaged


def as_unicode(value: Any) -> Any:
    """What JSON has, with ``?`` for halves of surrogate pairs: nothing that has one can be printed or written."""
    return json.loads(json.dumps(value, ensure_ascii=False).encode(errors="replace"))


def read_objects(run_dir: RunDir, folder: str, names: Iterable[str]) -> Iterator[tuple[str, bytes]]:
    """Names and contents, some at a time."""
    waiting = iter(names)
    while some := list(itertools.islice(waiting, _TOGETHER)):
        yield from zip(some, run_dir.read_all(folder, some), strict=True)


@dataclass(frozen=True)
class Found:
    """What is in a folder.

    Args:
        lines: by object, of those that count.
        obsolete: names of those that count no longer, or never did because they were cut.
        unfinished: names of those that were cut, or are still being written.
    """

    lines: Mapping[str, Sequence[Line]]
    obsolete: frozenset[str]
    unfinished: frozenset[str]


def stand_in(lines: Sequence[Line], *, names: Iterable[str], generation: int) -> bytes:
    """An object that stands for others."""
    head = {"event": INSTEAD, "generation": generation, "names": sorted(names), "lines": len(lines)}
    return "".join(json.dumps(line) + "\n" for line in (head, *lines)).encode()


def _stands_for(name: str, lines: Sequence[Line], num_damaged: int) -> list[str]:
    """Names of objects that do not count because of this one: itself, where not all of it is there."""
    head = lines[0] if lines else {}
    if head.get("event") != INSTEAD:
        return []
    names = head.get("names")
    is_whole = isinstance(names, list) and not num_damaged and len(lines) - 1 == head.get("lines")
    return [str(one) for one in names] if is_whole and isinstance(names, list) else [name]


class Folder:
    """The lines of a folder, as they become more.

    Args:
        is_sound: whether an object is one of the lines that belong there; others count as damaged.
        distinct: of lines, where objects stand for others: those that are there once. Two processes that put others in
            their place at the same time know nothing of each other.
        beside: more lines that belong there, from another place.

    Attributes:
        num_damaged: how many lines were passed over, of those that are there now.
    """

    def __init__(
        self,
        run_dir: RunDir,
        folder: str,
        *,
        is_sound: Callable[[Line], bool] = lambda line: True,
        distinct: Callable[[list[Line]], list[Line]] = lambda lines: lines,
        beside: Callable[[], list[Line]] = list,
    ) -> None:
        self._run_dir, self._folder, self._is_sound, self._distinct = run_dir, folder, is_sound, distinct
        self._beside = beside
        self._known: dict[str, list[Line]] = {}
        self._damaged: dict[str, int] = {}
        self._instead: dict[str, list[str]] = {}  # what each stands for
        self._open: set[str] = set()  # do not end with the end of a line

    @property
    def num_damaged(self) -> int:
        return sum(self._damaged.values())

    def read(self) -> list[Line]:
        """All lines that count by now, in the order of their objects' names. Only what is new is read from storage."""
        beside = [line for line in self._beside() if self._is_sound(line)]  # first: from there they may come here
        found = self.look().lines
        lines = [line for name in sorted(found) for line in found[name]]
        return [*(self._distinct(lines) if any(self._instead.values()) else lines), *beside]

    def look(self) -> Found:
        """The same by object."""
        tries = _TRIES
        while True:
            try:
                self._refresh()
                break
            except FileNotFoundError:  # deleted since it was listed: another one stands for it now
                tries -= 1
                if not tries:
                    raise
        obsolete = {one for names in self._instead.values() for one in names}
        lines = {name: some for name, some in self._known.items() if name not in obsolete}
        return Found(lines, frozenset(obsolete & self._known.keys()), frozenset(self._open & self._known.keys()))

    def _refresh(self) -> None:
        there = [name for name in self._run_dir.names(self._folder) if name.endswith(".jsonl")]
        new = [name for name in there if name not in self._known or name in self._open]
        for name, data in read_objects(self._run_dir, self._folder, new):
            found, num_damaged = parse(data)
            self._instead[name] = _stands_for(name, found, num_damaged)
            found = found[1:] if self._instead[name] else found
            sound = [line for line in found if self._is_sound(line)]
            self._known[name], self._damaged[name] = sound, num_damaged + len(found) - len(sound)
            (self._open.discard if data.endswith(b"\n") else self._open.add)(name)
        self._known = {name: self._known[name] for name in there}
        self._damaged = {name: self._damaged[name] for name in there}
        self._instead = {name: self._instead[name] for name in there}
