"""Curves as SVG: a line of means, and behind it the band between the lowest and the highest value of each part.

Everything that a person reads is text of the page; colours are classes of ``page.css``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

from elastictrain.metrics.console import format_count, format_value
from elastictrain.metrics.series import Buckets, Floats, Series, thin

_WIDTH, _HEIGHT = 960, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 944, 22, 268
NUM_BUCKETS = 600  # more than the pixels that most screens give them
MANY = 30  # lines, from which on they are drawn so that they do not cover what they are about
_LOG_FROM = 50.0  # ratio of the largest to the smallest value from which on the axis is logarithmic


@dataclass(frozen=True)
class Scale:
    """From values to places.

    Args:
        low, high: the values at ``start`` and ``stop``.
    """

    low: float
    high: float
    start: float
    stop: float
    is_log: bool = False

    def __call__(self, values: Floats) -> Floats:
        low, high = self.low, self.high
        if self.is_log:
            values, low, high = np.log10(values), math.log10(low), math.log10(high)
        return self.start + (values - low) / (high - low) * (self.stop - self.start)

    def ticks(self, num: int) -> list[float]:
        """Round values in between, about ``num`` of them."""
        if self.is_log:
            first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
            return [10.0**power for power in range(first, last + 1, max(1, -(-(last - first) // num)))]
        raw = (self.high - self.low) / num
        unit = 10.0 ** math.floor(math.log10(raw))
        step: float = next(factor * unit for factor in (1, 2, 5, 10) if factor * unit >= raw * 0.999)
        return [i * step for i in range(math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9) + 1)]


def vertical(found: Sequence[Buckets], *, start: float, stop: float, from_zero: bool = False) -> Scale:
    """A scale for all values of these series; logarithmic where they are all above 0 and far apart."""
    low = min(float(one.low.min()) for one in found)
    high = max(float(one.high.max()) for one in found)
    if from_zero:
        low = min(low, 0.0)
    if low > 0 and high / low >= _LOG_FROM:
        return Scale(low * 0.9, high * 1.1, start, stop, is_log=True)
    margin = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
    bottom = low - margin
    return Scale(0.0 if low >= 0 > bottom else bottom, high + margin, start, stop)


def chart(
    series: Mapping[str, Series], *, starts: Sequence[tuple[int, int]] = (), from_zero: bool = False
) -> tuple[str, dict[str, Any]]:
    """An SVG of the series over steps, and what the page's script needs to tell values under the pointer.

    Args:
        series: by name; each has a finite value.
        from_zero: the axis begins there, so that heights can be compared.
        starts: generations and the steps at which they began, to be marked.
    """
    thinned = {name: thin(one, num=NUM_BUCKETS) for name, one in series.items()}
    first = min(float(one.steps[0]) for one in thinned.values())
    last = max(float(one.steps[-1]) for one in thinned.values())
    across = Scale(first, last if last > first else first + 1, _LEFT, _RIGHT)
    up = vertical(list(thinned.values()), start=_BOTTOM, stop=_TOP, from_zero=from_zero)
    parts = [*_axes(across, up), *_starts(starts, across)]
    for number, one in enumerate(thinned.values()):
        parts += _curve(one, across(one.steps), up, number=number)
    told = "; ".join(
        f"{name} from {format_value(one.mean[0])} to {format_value(one.mean[-1])}" for name, one in thinned.items()
    )
    svg = (
        f'<svg class="chart" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" tabindex="0" aria-label="{escape(told)}">'
        + "".join(parts)
        + f'<line class="cursor" y1="{_TOP}" y2="{_BOTTOM}" visibility="hidden"/></svg>'
    )
    return svg, {"series": [_data(name, one, across) for name, one in thinned.items()]}


def _axes(across: Scale, up: Scale) -> list[str]:
    parts = []
    for value, y in zip(ticks := up.ticks(5), up(np.array(ticks)), strict=True):
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{_short(value)}</text>')
    for value, x in zip(ticks := across.ticks(8), across(np.array(ticks)), strict=True):
        parts.append(f'<text class="tick" x="{x:.1f}" y="{_BOTTOM + 18}" text-anchor="middle">{_short(value)}</text>')
    parts.append(f'<line class="axis" x1="{_LEFT}" x2="{_RIGHT}" y1="{_BOTTOM}" y2="{_BOTTOM}"/>')
    return parts


def _short(value: float) -> str:
    return format_count(value) if abs(value) >= 10_000 else format_value(round(value, 10))


def _starts(starts: Sequence[tuple[int, int]], across: Scale) -> list[str]:
    """Dashed lines; a number only where it does not cover another one."""
    parts, free = [], 0.0
    kind = "start many" if len(starts) > MANY else "start"
    for generation, step in starts:
        if across.low <= step <= across.high:
            x = float(across(np.array(float(step))))
            parts.append(f'<line class="{kind}" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{_BOTTOM}"/>')
            if x >= free:
                parts.append(f'<text class="tick" x="{x:.1f}" y="{_TOP - 8}" text-anchor="middle">g{generation}</text>')
                free = x + 36
    return parts


def _curve(one: Buckets, x: Floats, up: Scale, *, number: int) -> list[str]:
    mean, low, high = up(one.mean), up(one.low), up(one.high)
    parts = []
    if (one.counts > 1).any():
        there = [f"{a:.1f},{b:.1f}" for a, b in zip(x, high, strict=True)]
        back = [f"{a:.1f},{b:.1f}" for a, b in zip(x[::-1], low[::-1], strict=True)]
        parts.append(f'<polygon class="band s{number}" points="{" ".join(there + back)}"/>')
    points = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, mean, strict=True))
    parts.append(f'<polyline class="curve s{number}" points="{points}"/>')
    if len(x) <= 60:
        parts += [
            f'<circle class="dot s{number}" cx="{a:.1f}" cy="{b:.1f}" r="2.5"/>' for a, b in zip(x, mean, strict=True)
        ]
    return parts


def _data(name: str, one: Buckets, across: Scale) -> dict[str, Any]:
    data: dict[str, Any] = {"name": name, "x": [round(float(v), 1) for v in across(one.steps)]}
    data |= {"step": _rounded(one.steps), "mean": _rounded(one.mean)}
    if (one.counts > 1).any():
        data |= {"low": _rounded(one.low), "high": _rounded(one.high), "n": one.counts.tolist()}
    return data


def _rounded(values: Floats) -> list[float]:
    return [float(f"{value:.6g}") for value in values]


def sparkline(series: Series) -> str:
    """A small curve for a row of a table; empty where nothing finite was logged."""
    one = thin(series, num=80)
    if not len(one.steps):
        return ""
    first, last = float(one.steps[0]), float(one.steps[-1])
    x = Scale(first, last if last > first else first + 1, 1, 119)(one.steps)
    y = vertical([one], start=21, stop=3)(one.mean)
    points = " ".join(f"{a:.0f},{b:.1f}" for a, b in zip(x, y, strict=True))
    return f'<svg class="spark" viewBox="0 0 120 24" aria-hidden="true"><polyline points="{points}"/></svg>'
