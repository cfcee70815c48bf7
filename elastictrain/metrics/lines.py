"""JSON lines, back out of a folder of whole new objects.

An object is created once and never changed, so what has been read need not be read again. One that does not end with the
end of a line is still being written, or was cut when its writer died: it is looked at again the next time.

On failure: a line that is cut or damaged is passed over and counted. Storage that does not answer raises its own error.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from elastictrain.rundir import RunDir

Line = dict[str, Any]

_decode = json.JSONDecoder().raw_decode  # without a look for spaces around, which nobody writes
_TOGETHER = 64  # objects that are asked for at a time: enough for an object store, and not all of them in memory


def parse(data: bytes) -> tuple[list[Line], int]:
    """The JSON objects of an object's lines, and how many lines were none."""
    lines: list[Line] = []
    num_damaged = 0
    for text in data.decode(errors="replace").split("\n"):
        if not text:
            continue
        try:
            line, end = _decode(text)
        except (ValueError, RecursionError):
            line, end = None, 0
        if isinstance(line, dict) and end == len(text):
            lines.append(line)
        else:
            num_damaged += 1
    return lines, num_damaged


def read_objects(run_dir: RunDir, folder: str, names: Iterable[str]) -> Iterator[tuple[str, bytes]]:
    """Names and contents, some at a time."""
    waiting = iter(names)
    while some := list(itertools.islice(waiting, _TOGETHER)):
        yield from zip(some, run_dir.read_all(folder, some), strict=True)


class Folder:
    """The lines of a folder, as they become more.

    Args:
        is_sound: whether an object is one of the lines that belong there; others count as damaged.

    Attributes:
        num_damaged: how many lines were passed over, of those that are there now.
    """

    def __init__(self, run_dir: RunDir, folder: str, *, is_sound: Callable[[Line], bool] = lambda line: True) -> None:
        self._run_dir, self._folder, self._is_sound = run_dir, folder, is_sound
        self._known: dict[str, list[Line]] = {}
        self._damaged: dict[str, int] = {}
        self._open: set[str] = set()  # do not end with the end of a line

    @property
    def num_damaged(self) -> int:
        return sum(self._damaged.values())

    def read(self) -> list[Line]:
        """All lines by now, in the order of their objects' names. Only what is new is read from storage."""
        there = [name for name in self._run_dir.names(self._folder) if name.endswith(".jsonl")]
        new = [name for name in there if name not in self._known or name in self._open]
        for name, data in read_objects(self._run_dir, self._folder, new):
            found, num_damaged = parse(data)
            sound = [line for line in found if self._is_sound(line)]
            self._known[name], self._damaged[name] = sound, num_damaged + len(found) - len(sound)
            (self._open.discard if data.endswith(b"\n") else self._open.add)(name)
        return [line for name in there for line in self._known[name]]
