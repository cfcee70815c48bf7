"""What happened in a run and when: nodes × time by cause, and marks for what happened at one moment.

All of it is made from the lines of the ledger (:mod:`elastictrain.metrics.ledger`) and nothing else, by pure functions:
whoever draws (a page, a terminal, an image) begins here.

A node's account says how many seconds a cause had within a stretch of up to half a minute, not when in it. Phases that come
one after the other (starting, the phases of a recovery) are put in their order at its beginning; what alternates (steps,
data, validation) is spread over the rest of it.

On failure: lines are those of :func:`~elastictrain.metrics.ledger.read_ledger`, which passes damaged ones over; nothing here
can fail.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from elastictrain.metrics.console import event_line, format_count, format_seconds
from elastictrain.metrics.goodput import CAUSES, Stretch, stretches
from elastictrain.metrics.ledger import is_change

# Useful time is blue and what failures cost is red to orange: that holds for people who see no difference of red and green.
COLORS = {
    "productive": "#3d7edb",
    "validation": "#8fbcf5",
    "startup": "#868c96",
    "compile": "#b09a72",
    "data": "#e3b505",
    "checkpoint": "#8e5bc7",
    "detect": "#8c1c13",
    "rendezvous": "#bf4332",
    "rebuild": "#e3673b",
    "restore": "#f2a477",
    "replayed": "#d63384",
    "waiting": "#bcc2cb",
    "straggling": "#4fae9b",
    "unknown": "#5d5d6b",
}
assert COLORS.keys() == CAUSES.keys()

# Phases in the order in which they come, at the beginning of what a node did in a generation.
_PHASES = ("startup", "waiting", "detect", "rendezvous", "rebuild", "restore", "compile")
_NUMBER = {cause: index for index, cause in enumerate(CAUSES)}
DOUBT = 1.0  # seconds: when a killed agent ended is known to a beat of its signs of life


@dataclass(frozen=True)
class Row:
    """One node: its agents one after the other."""

    label: str
    stretches: tuple[Stretch, ...]


@dataclass(frozen=True)
class Mark:
    """Something that happened at one moment.

    Args:
        kind: "start", "end", "recovery", "change" (a planned one), "checkpoint", or what else the ledger calls an event.
        time: seconds since the epoch; of a recovery, and what is like one, when training stopped.
        text: one line for a person.
    """

    kind: str
    time: float
    generation: int
    step: int | None
    text: str


@dataclass(frozen=True)
class Timeline:
    """A run.

    Args:
        begin, end: seconds since the epoch of the first and the last thing that is known.
        marks: in order of time.
    """

    begin: float
    end: float
    rows: tuple[Row, ...]
    marks: tuple[Mark, ...]

    @property
    def starts(self) -> list[Mark]:
        """Where generations begin."""
        return [mark for mark in self.marks if mark.kind == "start"]


def timeline(lines: Iterable[Mapping[str, Any]]) -> Timeline:
    """The run that a ledger tells of."""
    lines = list(lines)
    rows = _rows(lines)
    marks = sorted(_marks(lines), key=lambda mark: (mark.time, mark.generation))
    times = [mark.time for mark in marks]
    times += [time for row in rows for time in (row.stretches[0].start, row.stretches[-1].stop)]
    return Timeline(min(times, default=0.0), max(times, default=0.0), tuple(rows), tuple(marks))


# ---- nodes × time --------------------------------------------------------------------------------------------------


def _rows(lines: Sequence[Mapping[str, Any]]) -> list[Row]:
    """An agent that is started again on a node goes on in its row; two at the same time have two."""
    names = {line["node"]: str(line["name"]) for line in lines if line["event"] in ("node", "agent")}
    by_agent: dict[str, list[Stretch]] = {}
    for stretch in stretches(lines):
        by_agent.setdefault(stretch.node, []).append(stretch)
    rows: dict[str, list[list[Stretch]]] = {}
    for agent, mine in sorted(by_agent.items(), key=lambda item: item[1][0].start):
        there = rows.setdefault(names.get(agent, agent), [])
        row = next((row for row in there if row[-1].stop <= mine[0].start + DOUBT), None)
        if row is None:
            there.append(mine)
        else:
            row += mine
    found = [
        Row(name if len(several) == 1 else f"{name} ({number})", tuple(row))
        for name, several in rows.items()
        for number, row in enumerate(several, 1)
    ]
    return sorted(found, key=lambda row: _natural(row.label))


def _natural(text: str) -> list[tuple[int, str]]:
    """A key by which node-9 sorts before node-10."""
    return [(int(part), "") if part.isdecimal() else (0, part) for part in re.split(r"(\d{1,18})", text)]


def columns(rows: Iterable[Row], *, begin: float, end: float, num: int) -> npt.NDArray[np.float64]:
    """Node-seconds of these rows together, by cause.

    Returns:
        float64, (``num``, causes): of ``num`` equal parts of the time from ``begin`` to ``end``; causes in their order.
    """
    found = np.zeros((num, len(CAUSES)))
    width = max(end - begin, 1e-9) / num
    pieces = np.array([piece for row in rows for piece in _pieces(row.stretches)]).reshape(-1, 4)
    low, high = (pieces[:, 0] - begin) / width, (pieces[:, 1] - begin) / width
    cause, spent = pieces[:, 2].astype(np.intp), pieces[:, 3]
    first = np.clip(low.astype(np.intp), 0, num - 1)
    last = np.clip(np.ceil(high).astype(np.intp) - 1, first, num - 1)
    inside = first == last
    np.add.at(found, (first[inside], cause[inside]), spent[inside])
    for i in np.flatnonzero(~inside):
        edges = np.clip(np.arange(first[i], last[i] + 2, dtype=float), low[i], high[i])
        found[first[i] : last[i] + 1, cause[i]] += spent[i] * np.diff(edges) / (high[i] - low[i])
    return found


def shares_below(seconds: npt.NDArray[np.float64], *, full: float) -> npt.NDArray[np.float64]:
    """Where each cause ends in a column, from below.

    Args:
        seconds: float64, (columns, causes), see :func:`columns`.
        full: seconds that fill a column.

    Returns:
        float64, (columns, causes): sums of shares; a column that is all but full is full, without a gap of rounding.
    """
    share: npt.NDArray[np.float64] = np.cumsum(seconds, axis=1) / full
    share *= np.where(share[:, -1:] > 0.98, 1 / np.maximum(share[:, -1:], 1e-9), 1.0)
    return share


def _pieces(row: Sequence[Stretch]) -> Iterator[tuple[float, float, int, float]]:
    """From, to, number of a cause, and how many seconds of that time it had."""
    opening = None  # the agent and generation that have begun
    for stretch in row:
        if stretch.stop <= stretch.start:
            continue
        begins, opening = opening != (stretch.node, stretch.generation), (stretch.node, stretch.generation)
        at, rest = stretch.start, dict(stretch.seconds)
        scale = (stretch.stop - stretch.start) / (sum(rest.values()) or 1.0)  # 1, but for rounding
        for cause in _PHASES:
            if cause in rest and (begins or cause != "startup"):  # else it is how the workers end
                length = rest.pop(cause) * scale
                yield at, at + length, _NUMBER[cause], length
                at += length
        for cause, spent in rest.items():
            yield at, stretch.stop, _NUMBER.get(cause, _NUMBER["unknown"]), spent * scale


# ---- marks ---------------------------------------------------------------------------------------------------------


def _marks(lines: Sequence[Mapping[str, Any]]) -> Iterator[Mark]:
    there = _nodes(lines)
    for line in lines:
        event, generation = line["event"], line["generation"]
        if event in ("node", "time", "alive", "agent", "gone", "reading") or "time" not in line:
            continue
        time, step = line["time"], line.get("step")
        if event == "start":
            text = ", ".join([_size(line), *_changes(there, generation)])
        elif event == "end":
            text = line["outcome"]
        elif event == "checkpoint":
            text = f"saved in {format_seconds(line['seconds'])}, {format_count(line['num_bytes'])}B"
        elif is_change(line):
            time, step, text = time - line["seconds"]["total"], line["from_step"], event_line(line)
        else:
            about = {k: v for k, v in line.items() if k not in ("event", "generation", "node", "time", "step")}
            text = ", ".join(str(v) if k == "text" else f"{k} {v}" for k, v in about.items())
        kind = "change" if event == "recovery" and line.get("planned") is True else event
        yield Mark(kind, time, generation, step, _one_line(text))


def _size(line: Mapping[str, Any]) -> str:
    ranks = line["world_size"]
    mesh = line.get("mesh")
    return f"{ranks} rank{'s' * (ranks != 1)}" + (f" ({mesh})" if mesh and mesh != "one rank" else "")


def _nodes(lines: Iterable[Mapping[str, Any]]) -> dict[int, dict[str, str]]:
    """By generation, the names of its nodes by their agents."""
    found: dict[int, dict[str, str]] = {}
    for line in lines:
        if line["event"] == "node":
            found.setdefault(line["generation"], {})[line["node"]] = str(line["name"])
    return found


def _changes(there: Mapping[int, Mapping[str, str]], generation: int) -> list[str]:
    """Which nodes are there that were not before, and the other way round."""
    before = there.get(max((g for g in there if g < generation), default=-1), {})
    now = there.get(generation, {})
    if not before or not now:
        return []
    came, left = [name for a, name in now.items() if a not in before], [n for a, n in before.items() if a not in now]
    again = [name for name in came if name in left]
    told = {"joined": [n for n in came if n not in again], "left": [n for n in left if n not in again]}
    told["started again"] = again
    return [f"{_some(sorted(names, key=_natural))} {what}" for what, names in told.items() if names]


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _one_line(text: Any) -> str:
    """Without characters that would break out of a line."""
    return " ".join("".join(c if c.isprintable() else " " for c in str(text)).split())


def timeline_markdown(lines: Iterable[Mapping[str, Any]], *, limit: int = 200) -> str:
    """The marks as a table.

    Args:
        limit: how many rows there are at most; the oldest are left out, and that is said.
    """
    run = timeline(lines)
    marks = run.marks[-limit:]
    rows = ["| after | event | generation | step | |", "|---:|---|---:|---:|---|"]
    for mark in marks:
        text = re.sub(r"([\\|`*_<>\[\]])", r"\\\1", mark.text)
        step = "" if mark.step is None else mark.step
        rows.append(
            f"| {format_seconds(max(0.0, mark.time - run.begin))} | {mark.kind} | {mark.generation} | {step} | {text} |"
        )
    if len(marks) < len(run.marks):
        rows += ["", f"{len(run.marks) - len(marks)} earlier events are left out."]
    return "\n".join(rows) + "\n"
