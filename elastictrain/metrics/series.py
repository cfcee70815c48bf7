"""What was logged, by name, as arrays; and long series made short without hiding anything.

A run of 100,000 steps has some millions of values, so lines become arrays as they are read. Of steps that a later start did
again, or lost and has yet to do again, only the later values stay, as in TensorBoard.

On failure: a line that is cut or damaged is passed over and counted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from elastictrain.metrics.lines import Line, parse, read_objects
from elastictrain.metrics.record import FIELDS, FOLDER, LOOSE
from elastictrain.rundir import RunDir

# How the names begin that the trainer logs about the run itself and not about what is trained.
ABOUT_THE_RUN = ("time/", "throughput/", "memory/", "elastic/", "goodput/", "checkpoint/")

Floats = npt.NDArray[np.float64]
_LARGEST = 1e300


@dataclass(frozen=True)
class Series:
    """What was logged under one name.

    Args:
        steps: float64, rising; finished steps.
        values: float64, one for each of them; NaN and infinite where that was logged.
    """

    steps: Floats
    values: Floats

    @property
    def num_not_finite(self) -> int:
        return int(np.count_nonzero(~np.isfinite(self.values)))

    @property
    def finite(self) -> Series:
        """Without what is NaN or infinite."""
        good = np.isfinite(self.values)
        return self if good.all() else Series(self.steps[good], self.values[good])


@dataclass(frozen=True)
class Buckets:
    """A series in parts of equally many steps; those in which nothing finite was logged are not there.

    Args:
        steps: float64, (n,): where a part is, the mean of its steps. The same shape have
        low, mean, high: of its finite values, and
        counts: int64, how many these are.
    """

    steps: Floats
    low: Floats
    mean: Floats
    high: Floats
    counts: npt.NDArray[np.int64]


def thin(series: Series, *, num: int) -> Buckets:
    """At most ``num`` parts: every value is within its part's ``low`` and ``high``, and counts once in its ``mean``.

    Values beyond ±1e300 become that, so that differences of what is to be drawn are finite.
    """
    series = series.finite
    size = len(series.steps)
    values = np.clip(series.values, -_LARGEST, _LARGEST)
    if size <= num:
        return Buckets(series.steps, values, values, values, np.ones(size, np.int64))
    first, last = series.steps[0], series.steps[-1]
    part = np.minimum((series.steps - first) * (num / (last - first)), num - 1).astype(np.int64)
    begins = np.flatnonzero(np.diff(part, prepend=-1))
    counts = np.diff(begins, append=size)
    low, high = np.minimum.reduceat(values, begins), np.maximum.reduceat(values, begins)
    mean = np.add.reduceat(values / counts.repeat(counts), begins)  # divided first: a sum may be too large
    return Buckets(np.add.reduceat(series.steps, begins) / counts, low, np.clip(mean, low, high), high, counts)


def read_series(run_dir: RunDir, *, starts: Mapping[int, int] = {}) -> tuple[dict[str, Series], int]:
    """Everything that was logged, by name in order of appearance, and how many lines were passed over.

    Args:
        starts: the finished steps at which a start began, by its number, of the ledger; of others the first line is taken.
    """
    names = [name for name in run_dir.names(FOLDER) if name.endswith(".jsonl")]
    columns = _Columns()
    num_damaged = 0
    for _, data in read_objects(run_dir, FOLDER, names):
        lines, damaged = parse(data)
        num_damaged += damaged + columns.add(lines)
    return columns.series(starts), num_damaged


class _Columns:
    """Values by name, as they were written."""

    def __init__(self) -> None:
        self._tables: list[tuple[tuple[str, ...], Floats]] = []  # names of columns; before them, the lines' numbers
        self._num_lines = 0

    def add(self, lines: Sequence[Line]) -> int:
        """Take the lines of one object; how many were damaged."""
        groups: dict[tuple[str, ...], list[int]] = {}
        for number, line in enumerate(lines):
            groups.setdefault(tuple(line), []).append(number)
        num_damaged = 0
        for keys, numbers in groups.items():
            table = _table([lines[number] for number in numbers], keys)
            if table is None:  # not all of them are what they should be
                sound = [number for number in numbers if is_sound(lines[number])]
                num_damaged += len(numbers) - len(sound)
                if not sound:
                    continue
                numbers = sound
                table = _table([lines[number] for number in numbers], keys)
                assert table is not None
            order = np.array(numbers, np.float64) + self._num_lines
            self._tables.append((keys, np.column_stack([order, table])))
        self._num_lines += len(lines)
        return num_damaged

    def series(self, starts: Mapping[int, int]) -> dict[str, Series]:
        limits = self._limits(starts)
        places: dict[str, list[tuple[Floats, int, int, int]]] = {}
        for keys, table in self._tables:
            step, generation = 1 + keys.index("step"), 1 + keys.index("generation")
            for column, name in enumerate(keys, 1):
                if name not in FIELDS:
                    places.setdefault(name, []).append((table, generation, step, column))
        found = {}
        for name, parts in places.items():
            whole = np.concatenate([table[:, [0, *columns]] for table, *columns in parts])
            _, generations, steps, values = whole[np.argsort(whole[:, 0], kind="stable")].T
            known, which = np.unique(generations, return_inverse=True)
            stays = steps <= np.array([limits[generation] for generation in known.tolist()])[which]
            later = np.minimum.accumulate(steps[::-1])[::-1]
            stays[:-1] &= steps[:-1] < later[1:]  # nor has it been logged again since, at this step or an earlier one
            found[name] = Series(steps[stays], values[stays])
        return found

    def _limits(self, starts: Mapping[int, int]) -> dict[float, float]:
        """By generation, the step after which a later one did all again.

        One that took lines over from an earlier start begins with those.
        """
        first = {float(generation): float(step or -1) for generation, step in starts.items()}
        for keys, table in self._tables:
            steps, generations = table[:, 1 + keys.index("step")], table[:, 1 + keys.index("generation")]
            for generation in np.unique(generations).tolist():
                step = float(steps[generations == generation].min())
                first[generation] = min(step, first.get(generation, step))
        limits, limit = {}, math.inf
        for generation in sorted(first, reverse=True):
            limits[generation], limit = limit, min(limit, first[generation])
        return limits


def _table(group: Sequence[Line], keys: tuple[str, ...]) -> Floats | None:
    """Lines with the same names, one a row; None if something in them is not what it should be."""
    if not {"step", "generation"} <= set(keys):
        return None
    try:
        table = np.array([list(line.values()) for line in group], np.float64)  # "NaN" becomes one, like "Infinity"
    except (ValueError, TypeError, OverflowError):
        return None
    if table.ndim != 2:
        return None
    counts = table[:, [keys.index("step"), keys.index("generation")]]
    return table if ((counts >= 0) & (counts < 2**53) & (counts == np.floor(counts))).all() else None


def is_sound(line: Line, *, counts: Sequence[str] = ("step", "generation")) -> bool:
    """Whether everything in a line is a number, and these are counts."""
    return all(type(line.get(name)) is int and 0 <= line[name] < 2**53 for name in counts) and all(
        _is_number(value) for value in line.values()
    )


def _is_number(value: Any) -> bool:
    if isinstance(value, str):
        return value in LOOSE
    return isinstance(value, float) or (isinstance(value, int) and -(2**63) <= value < 2**64)
