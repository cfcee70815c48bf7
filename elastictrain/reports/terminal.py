"""A report in the terminal: framed tables and small pictures, or plain ``name: value`` lines where there is no terminal.

The plain lines keep their form, and are never wrapped, so that ``grep`` finds them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from elastictrain.metrics.console import (
    format_count,
    format_percent,
    format_seconds,
    format_value,
    is_terminal,
    print_line,
)
from elastictrain.metrics.goodput import CAUSES, summed
from elastictrain.metrics.picture import rows_to_draw
from elastictrain.metrics.series import Series, thin
from elastictrain.metrics.timeline import COLORS, columns
from elastictrain.reports.chart import vertical
from elastictrain.reports.facts import (
    Report,
    cause_of,
    damage_in_words,
    facts,
    in_words,
    mark_in_words,
    meaning,
    waterfall,
    who,
)

_MAX_ROWS = 12  # of a table; the newest
_MAX_NODES = 24
_CURVE_ROWS = 6


def show(report: Report, *, console: Console) -> None:
    """Print the report."""
    if is_terminal(console) and console.encoding.lower().startswith("utf"):
        _draw(report, console)
    else:
        for line in _lines(report):
            print_line(line, console=console)


# ---- plain lines ---------------------------------------------------------------------------------------------------


def _lines(report: Report) -> Iterator[str]:
    run = report.timeline
    yield report.title
    for name, value in facts(report):
        yield f"  {name}: {value}"
    for name, series in report.rates.items():
        yield f"  {name}: {in_words(series)}"
    for cause, seconds, _ in waterfall(report.account):
        share = format_percent(100 * seconds / report.account.total)
        yield f"  spent: {cause} {format_seconds(seconds)} ({share})"
    for row in run.rows:
        first, last = row.stretches[0].start - run.begin, row.stretches[-1].stop - run.begin
        spent = sorted(summed(row.stretches).seconds.items(), key=lambda item: -item[1])
        parts = (f"{cause} {format_seconds(seconds)}" for cause, seconds in spent if seconds >= 0.05)
        yield f"  node: {row.label} from {format_seconds(first)} to {format_seconds(last)}: {', '.join(parts)}"
    for mark in run.marks:
        yield f"  event: {mark_in_words(mark, run)}"
    for one in report.checkpoints:
        yield f"  checkpoint: step {one.step} {'there' if one.is_there else 'deleted'} {one.path}"
    if (damage := damage_in_words(report)) is not None:
        yield f"  note: {damage}"


# ---- drawn ---------------------------------------------------------------------------------------------------------


def _draw(report: Report, console: Console) -> None:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in facts(report):
        grid.add_row(Text(name), Text(value))
    _title(console, report.title)
    console.print(grid)
    if (damage := damage_in_words(report)) is not None:
        console.print(Text(damage, style="yellow"))
    for name, series in [*report.losses.items(), *report.quality.items(), *report.rates.items()]:
        if len(series.finite.steps) > 1:
            _title(console, f"{name}: {in_words(series)}")
            console.print(_curve(series, width=min(console.width, 110)))
    if report.account.total > 0:
        _title(console, "where the time went")
        console.print(_account(report, width=min(console.width, 110)))
    if report.timeline.rows:
        _title(console, "nodes over time")
        for line in _nodes(report, width=min(console.width, 110)):
            console.print(line, no_wrap=True, overflow="crop")
    _recoveries(report, console)
    _checkpoints(report, console)


def _title(console: Console, text: str) -> None:
    console.print()
    console.print(Text(text, style="bold"))


def _curve(series: Series, *, width: int) -> Text:
    """In dots of Braille, two by four to a letter: a line of means, and from the lowest to the highest of each part."""
    axis = 10
    num = 2 * (width - axis)
    one = thin(series, num=num)
    first, last = one.steps[0], one.steps[-1]
    dots = np.zeros((4 * _CURVE_ROWS, num), bool)
    scale = vertical([one], start=dots.shape[0] - 1, stop=0)
    at = np.linspace(first, last, num)
    low, mean, high = (np.interp(at, one.steps, scale(values)) for values in (one.low, one.mean, one.high))
    following = np.append(mean[1:], mean[-1])  # what is steep stays one line
    tops = np.minimum(high, np.minimum(mean, following)).round().astype(int)
    bottoms = np.maximum(low, np.maximum(mean, following)).round().astype(int)
    for column, (top, bottom) in enumerate(zip(tops, bottoms, strict=True)):
        dots[top : bottom + 1, column] = True
    cells = dots.reshape(_CURVE_ROWS, 4, -1, 2)
    bits = np.array([[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]])  # Unicode, Braille Patterns
    codes = (cells * bits[None, :, None, :]).sum(axis=(1, 3)) + 0x2800
    text = Text()
    for number, row in enumerate(codes):
        label = {0: scale.high, _CURVE_ROWS - 1: scale.low}.get(number)
        text.append(f"{'' if label is None else format_value(float(f'{label:.3g}')):>{axis - 1}} ", style="dim")
        text.append("".join(map(chr, row)) + "\n", style="cyan")
    ends = f"step {first:.0f}", f"step {last:.0f}"
    text.append(" " * axis + ends[0] + ends[1].rjust(width - axis - len(ends[0])), style="dim")
    return text


def _account(report: Report, *, width: int) -> Table:
    account = report.account
    table = Table(box=box.SIMPLE, show_edge=False, pad_edge=False, show_footer=True)
    total = format_seconds(account.total)
    table.add_column("cause", footer="all")
    table.add_column("")
    table.add_column("node time", justify="right", footer=total)
    table.add_column("share", justify="right", footer="100.0%")
    table.add_column("", style="dim")
    length = max(10, width - 90)
    for cause, seconds, before in waterfall(account):
        begin = round(length * before / account.total)
        end = max(begin + 1, round(length * (before + seconds) / account.total))
        begin = min(begin, length - 1)
        bar = Text(" " * begin) + Text("█" * (min(end, length) - begin), style=COLORS[cause])
        bar.pad_right(length - len(bar))
        share = format_percent(100 * seconds / account.total)
        table.add_row(Text(cause, style=COLORS[cause]), bar, format_seconds(seconds), share, meaning(cause))
    return table


def _nodes(report: Report, *, width: int) -> Iterable[Text]:
    """Each letter in the colour of what most of its time went into; the line above has the generations."""
    run = report.timeline
    rows = rows_to_draw(run, limit=_MAX_NODES)
    label = min(max(len(name) for name, _ in rows), 20)
    num = width - label - 1
    length = max(run.end - run.begin, 1e-9)
    heads = [" "] * num
    for mark in run.starts:
        at = min(int((mark.time - run.begin) / length * num), num - 1)
        number = f"g{mark.generation}"
        if at + len(number) <= num and set(heads[max(0, at - 1) : at + len(number)]) <= {" "}:
            heads[at : at + len(number)] = number
    yield Text(" " * (label + 1) + "".join(heads), style="dim")
    names = list(CAUSES)
    for name, group in rows:
        seconds = columns(group, begin=run.begin, end=run.end, num=num)
        text = Text(f"{name[-label:]:<{label}} ")
        for part in seconds:
            there = part.sum() > 0.05 * length / num
            text.append("█" if there else "·", style=COLORS[names[int(part.argmax())]] if there else "dim")
        yield text
    end = format_seconds(length)
    yield Text(" " * (label + 1) + "0" + end.rjust(num - 1), style="dim")
    key = Text(" " * (label + 1))
    for cause, _, _ in waterfall(report.account):
        key.append("█ ", style=COLORS[cause])
        key.append(f"{cause}  ")
    yield key


def _recoveries(report: Report, console: Console) -> None:
    found = report.changes
    if not found:
        return
    _title(console, "recoveries")
    table = Table(box=box.SIMPLE, show_edge=False, pad_edge=False)
    table.add_column("after", justify="right")
    table.add_column("cause", overflow="fold")
    for name in ("g", "at step", "from", "again", "took"):
        table.add_column(name, justify="right")
    table.add_column("of which; on from", overflow="fold", style="dim")
    for one in found[-_MAX_ROWS:]:
        took = one["seconds"]
        phases = ", ".join(
            f"{p.replace('_', ' ')} {format_seconds(s)}" for p, s in took.items() if p != "total" and s >= 0.05
        )
        numbers = (str(one[name]) for name in ("generation", "from_step", "resumed_step", "lost_steps"))
        after = format_seconds(max(0.0, one["time"] - took["total"] - report.timeline.begin))
        table.add_row(
            after,
            Text(", ".join(filter(None, (cause_of(one), who(one))))),
            *numbers,
            format_seconds(took["total"]),
            "; ".join(filter(None, (phases, one.get("source", "")))),
        )
    console.print(table)
    _left_out(len(found), console)


def _checkpoints(report: Report, console: Console) -> None:
    if not report.checkpoints:
        return
    _title(console, "checkpoints")
    table = Table(box=box.SIMPLE, show_edge=False, pad_edge=False)
    for name in ("step", "took", "size"):
        table.add_column(name, justify="right")
    table.add_column("now")
    table.add_column("path", overflow="fold")
    for one in report.checkpoints[-_MAX_ROWS:]:
        took = "" if one.seconds is None else format_seconds(one.seconds)
        size = "" if one.num_bytes is None else f"{format_count(one.num_bytes)}B"
        table.add_row(str(one.step), took, size, "there" if one.is_there else "deleted", Text(one.path))
    console.print(table)
    _left_out(len(report.checkpoints), console)


def _left_out(count: int, console: Console) -> None:
    if count > _MAX_ROWS:
        console.print(Text(f"{count - _MAX_ROWS} earlier ones are left out here", style="dim"))
