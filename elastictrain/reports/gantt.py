"""Nodes × time as SVG: each row filled, from below, with the shares of its time that each cause had.

A row is cut into so many parts that the whole stays small however long the run was and however many nodes it had; within a
part nothing is left out, it is drawn with the height of its share.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from html import escape

import numpy as np
import numpy.typing as npt

from elastictrain.metrics.console import format_seconds
from elastictrain.metrics.goodput import CAUSES
from elastictrain.metrics.picture import rows_to_draw, ticks
from elastictrain.metrics.timeline import Mark, Timeline, columns, shares_below
from elastictrain.reports.chart import MANY
from elastictrain.reports.facts import mark_in_words

_WIDTH, _LEFT, _RIGHT, _TOP = 960, 128, 944, 34
_MAX_ROWS = 96
_MAX_PARTS = 30_000  # of all rows together
_MAX_MARKS = 1000


def gantt(run: Timeline) -> str:
    """An SVG of the run."""
    rows = rows_to_draw(run, limit=_MAX_ROWS)
    height = 24 if len(rows) <= 16 else 14 if len(rows) <= 48 else 9
    num = max(80, min(816, _MAX_PARTS // max(1, len(rows))))
    bottom = _TOP + len(rows) * (height + 4)
    parts = []
    for number, (label, group) in enumerate(rows):
        y = _TOP + number * (height + 4)
        short = label if len(label) <= 16 else "…" + label[-15:]
        parts.append(
            f'<text class="row" x="{_LEFT - 8}" y="{y + height / 2 + 4:.0f}" text-anchor="end">{escape(short)}'
            f"<title>{escape(label)}</title></text>"
        )
        parts.append(f'<rect class="lane" x="{_LEFT}" y="{y}" width="{_RIGHT - _LEFT}" height="{height}"/>')
        seconds = columns(group, begin=run.begin, end=run.end, num=num)
        parts += _filled(seconds, label=label, y=y, height=height, full=_length(run) / num * len(group))
    parts += [*_axis(run, bottom), *_marks(run, bottom)]
    told = f"{len(run.rows)} nodes over {format_seconds(_length(run))}; the table above has the seconds by cause"
    return (
        f'<svg class="gantt" viewBox="0 0 {_WIDTH} {bottom + 44}" role="img" aria-label="{told}">{"".join(parts)}</svg>'
    )


def _length(run: Timeline) -> float:
    return max(run.end - run.begin, 1e-9)


def _filled(seconds: npt.NDArray[np.float64], *, label: str, y: int, height: int, full: float) -> list[str]:
    """One path for each cause; parts beside each other with the same shares are one rectangle."""
    num = len(seconds)
    tops = np.round(np.clip(shares_below(seconds, full=full), 0, 1) * height, 1)
    cuts = [0, *(np.flatnonzero((tops[1:] != tops[:-1]).any(axis=1)) + 1).tolist(), num]
    width = (_RIGHT - _LEFT) / num
    paths: dict[int, list[str]] = {}
    for begin, end in itertools.pairwise(cuts):
        below = 0.0
        for cause, top in enumerate(tops[begin].tolist()):
            if top > below:
                x, w = _LEFT + begin * width, (end - begin) * width
                paths.setdefault(cause, []).append(
                    f"M{x:.1f} {y + height - top:.1f}h{w:.1f}v{top - below:.1f}h-{w:.1f}z"
                )
                below = top
    names, total = list(CAUSES), seconds.sum(axis=0)
    return [
        f'<path class="c-{names[cause]}" d="{"".join(d)}"><title>{escape(label)}: {names[cause]}'
        f" {format_seconds(total[cause])}</title></path>"
        for cause, d in paths.items()
    ]


def _axis(run: Timeline, bottom: int) -> list[str]:
    parts = [f'<line class="axis" x1="{_LEFT}" x2="{_RIGHT}" y1="{bottom}" y2="{bottom}"/>']
    for tick in ticks(_length(run), num=9):
        x = _LEFT + (_RIGHT - _LEFT) * tick / _length(run)
        text = format_seconds(tick) if tick else "0"
        parts.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{bottom}" y2="{bottom + 5}"/>')
        parts.append(f'<text class="tick" x="{x:.1f}" y="{bottom + 20}" text-anchor="middle">{text}</text>')
    return parts


def _marks(run: Timeline, bottom: int) -> list[str]:
    """Lines where generations begin; above, failures and other events; below, checkpoints."""
    parts, free = [], 0.0
    kind = "start many" if len(run.starts) > MANY else "start"
    for mark in _chosen(run.marks):
        x = _LEFT + (_RIGHT - _LEFT) * (mark.time - run.begin) / _length(run)
        title = f"<title>{escape(mark_in_words(mark, run))}</title>"
        if mark.kind == "start":
            parts.append(f'<path class="{kind}" d="M{x:.1f} {_TOP - 6}V{bottom}">{title}</path>')
            if x >= free:
                parts.append(f'<text class="tick" x="{x:.1f}" y="12" text-anchor="middle">g{mark.generation}</text>')
                free = x + 36
        elif mark.kind == "checkpoint":
            parts.append(f'<path class="m-checkpoint" d="M{x:.1f} {bottom + 28}l4 5l-4 5l-4-5z">{title}</path>')
        else:
            shape = mark.kind if mark.kind in ("recovery", "change", "end") else "other"
            parts.append(f'<path class="m-{shape}" d="M{x - 5:.1f} {_TOP - 14}h10l-5 9z">{title}</path>')
    return parts


def _chosen(marks: Sequence[Mark]) -> list[Mark]:
    """Where there are too many checkpoints, each n-th of them; the rest is what a person looks for."""
    saves = [mark for mark in marks if mark.kind == "checkpoint"]
    kept = set(map(id, saves[:: max(1, -(-len(saves) // 300))]))
    return [mark for mark in marks if mark.kind != "checkpoint" or id(mark) in kept][:_MAX_MARKS]
