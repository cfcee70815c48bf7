"""Fewer lines of the ledger that add up to the same, and objects that stand for others.

A long run has a line of every node for each half minute. Lines of one node that follow each other without a hole become one,
the older ones first: times, steps and seconds by cause add up, so that no total changes. Which steps were in vain is told by
whole lines where it is known, so lines on both sides of the step that a later start went on from stay apart. Where a start
yet to come goes on from the middle of a line, its steps count as equally long, as they always do; the newest lines of a node
are left as they are, so that this is no coarser where a rollback is short.

They are written to an object that stands for others (:mod:`elastictrain.metrics.lines`). Those are deleted one round later:
by then nobody reads by a list that has them, and what replaced them is long on the disk.

Two processes may do this at once: a node that is cut off and does not know that another start has begun, or the reader of
an earlier start. Then two objects stand for the same ones, and lines are there twice, once as they were and once as a part
of a longer line. Nothing is lost by that, and :func:`distinct` counts each second once.

Nothing here can fail but for storage that does not answer.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterable, Iterator, Sequence

from elastictrain.metrics.lines import Line
from elastictrain.rundir import RunDir

MOST_EVENTS = 1000  # of each kind that counts for no total: the newest ones stay
_COUNT = ("start", "node", "alive", "agent", "gone")

# What alternates as training goes on; phases at the beginning of an account stay apart, for they have an order.
_STEADY = frozenset({"productive", "validation", "data", "checkpoint", "straggling"})


def condense(lines: Sequence[Line], *, most: int) -> list[Line]:
    """Lines with the same totals.

    Args:
        lines: of one node and start, or of many, with the ``start`` lines of later ones, where those are known.
        most: how many accounts of time there shall be at most for each node and start; phases may keep more apart.
    """
    resumed = [(line["generation"], line["step"]) for line in lines if line["event"] == "start"]
    accounts: dict[tuple[str, int], list[Line]] = {}
    others: dict[str, list[Line]] = {}
    for line in lines:
        if line["event"] == "time":
            accounts.setdefault((line["node"], line["generation"]), []).append(line)
        else:
            others.setdefault(line["event"], []).append(line)
    found: list[Line] = []
    for kind, events in others.items():
        if kind == "alive":  # what counts are those since the last account
            ends = {who: max(line["to"] for line in mine) for who, mine in accounts.items()}
            events = [line for line in events if line["time"] > ends.get((line["node"], line["generation"]), 0.0)]
        found += events if kind in _COUNT else events[-MOST_EVENTS:]
    for (_, generation), mine in accounts.items():
        kept = min([step for later, step in resumed if later > generation], default=math.inf)
        mine.sort(key=lambda line: (line["from"], line["to"]))
        found += _fewer(mine, most, kept)
    return found


def distinct(lines: Sequence[Line]) -> list[Line]:
    """Those that are there once, in their order; of accounts of the same time, those that cover it without a break."""
    accounts: dict[tuple[str, int], list[Line]] = {}
    seen: set[str] = set()
    once = []
    for line in lines:
        if line["event"] == "time" and line["from"] < line["to"]:
            accounts.setdefault((line["node"], line["generation"]), []).append(line)
            once.append(line)
        elif (text := json.dumps(line, sort_keys=True)) not in seen:
            seen.add(text)
            once.append(line)
    kept = {id(line) for mine in accounts.values() for line in _chain(mine)}
    return [line for line in once if line["event"] != "time" or line["from"] == line["to"] or id(line) in kept]


def _chain(lines: list[Line]) -> Iterator[Line]:
    """Of one node's accounts, as one after the other as there are: from the end of one, the way that leads farthest."""
    reach: dict[float, float] = {}  # how far one comes from where a line begins, by the best one there
    best: dict[float, Line] = {}
    for line in sorted(lines, key=lambda line: -float(line["from"])):
        begin, end = float(line["from"]), float(line["to"])
        end = reach.get(end, end)
        if begin not in reach or end > reach[begin]:
            reach[begin], best[begin] = end, line
    covered = -math.inf
    for at in sorted(best):
        if at in best and reach[at] > covered:
            while at in best:
                line = best.pop(at)
                yield line
                at = float(line["to"])
            covered = max(covered, at)


def _fewer(lines: list[Line], most: int, kept: float) -> list[Line]:
    """Neighbours become one, in the older half as long as that helps."""
    everywhere = False
    while len(lines) > most:
        end = len(lines) if everywhere else len(lines) // 2
        fewer = list(_paired(lines, end, kept))
        if len(fewer) == len(lines):
            if everywhere:
                break
            everywhere = True
        lines = fewer
    return lines


def _paired(lines: Sequence[Line], end: int, kept: float) -> Iterator[Line]:
    index = 0
    while index < len(lines):
        if index + 1 < end and _fit(lines[index], lines[index + 1], kept):
            yield _joined(lines[index], lines[index + 1])
            index += 2
        else:
            yield lines[index]
            index += 1


def _fit(a: Line, b: Line, kept: float) -> bool:
    is_steady = _STEADY.issuperset(a["seconds"]) and _STEADY.issuperset(b["seconds"])
    follows = a["to"] == b["from"] and a["steps"][1] == b["steps"][0]
    return is_steady and follows and (side := _side(a, kept)) == _side(b, kept) and side is not None


def _side(line: Line, kept: float) -> str | None:
    first, last = line["steps"]
    return "kept" if last <= kept else "in vain" if first >= kept else None


def _joined(a: Line, b: Line) -> Line:
    seconds = {
        cause: a["seconds"].get(cause, 0.0) + b["seconds"].get(cause, 0.0) for cause in a["seconds"] | b["seconds"]
    }
    return {**b, "from": a["from"], "steps": [a["steps"][0], b["steps"][1]], "seconds": seconds}


def remove(run_dir: RunDir, folder: str, names: Iterable[str]) -> set[str]:
    """Delete objects that count no longer; those that may still be there."""
    left = set()
    for name in names:
        try:
            with contextlib.suppress(FileNotFoundError):
                run_dir.fs.rm_file(run_dir.join(folder, name))
        except Exception:  # another round will try
            left.add(name)
    return left


def generation_of(name: str) -> int | None:
    """The start that has written a segment; None: it is none."""
    parts = name.removesuffix(".jsonl").split("-")
    is_one = len(parts) == 3 and parts[0].startswith("g") and parts[0][1:].isdigit() and parts[1].isdigit()
    return int(parts[0][1:]) if is_one else None
