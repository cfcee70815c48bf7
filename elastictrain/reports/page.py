"""A report as one HTML file: no network, no other file, light and dark, to be read in a minute.

Everything is drawn here; the script of the page only tells values under the pointer. All text of a run is escaped, and the
page's own policy keeps anything from being loaded or run that is not in the file.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from importlib.resources import files
from typing import Any

from elastictrain.metrics.console import format_count, format_percent, format_seconds, format_value
from elastictrain.metrics.goodput import USEFUL
from elastictrain.metrics.series import Series
from elastictrain.metrics.status import is_planned
from elastictrain.metrics.timeline import COLORS
from elastictrain.reports.chart import chart, sparkline
from elastictrain.reports.facts import Report, cause_of, damage_in_words, facts, in_words, meaning, waterfall, who
from elastictrain.reports.gantt import gantt

_MAX_ROWS = 200  # of a table; the newest
_MAX_NAMES = 200  # of what else was logged
_PHASES = ("detect", "rendezvous", "waiting", "rebuild", "restore", "first_step", "total")


def page(report: Report) -> str:
    """The whole file."""
    charts: list[dict[str, Any]] = []
    body = [
        *_head(report),
        *_curves(report, "Loss", [report.losses], charts),
        *(_curves(report, "Quality", _each(report.quality), charts) if report.quality else []),
        *_curves(report, "Throughput", _each(report.rates), charts, from_zero=True),
        *_account(report),
        *_nodes(report),
        *_recoveries(report),
        *_checkpoints(report),
        *_events(report),
        *_others(report),
        *_about(report),
    ]
    style = files(__package__).joinpath("page.css").read_text(encoding="utf-8")
    style += "".join(f".c-{cause}{{fill:{color}}}.k-{cause}{{background:{color}}}" for cause, color in COLORS.items())
    script = files(__package__).joinpath("page.js").read_text(encoding="utf-8")
    allowed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{allowed}'"
    data = json.dumps(charts, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(report.title)}: report</title>\n<style>\n{style}\n</style>\n</head>\n<body>\n<main>",
            *body,
            f'</main>\n<script type="application/json" id="data">{data}</script>',
            f"<script>{script}</script>\n</body>\n</html>\n",
        ]
    )


# ---- the sections --------------------------------------------------------------------------------------------------


def _head(report: Report) -> Iterable[str]:
    found, run = report.status, report.timeline
    yield f"<header>\n<h1>{escape(report.title)}</h1>"
    rows = dict(facts(report))
    state, _, rest = rows["state"].partition(";")
    yield f'<p><span class="state {escape(found["state"])}">{escape(state)}</span>;{escape(rest)}.</p>'
    if (damage := damage_in_words(report)) is not None:
        yield f'<p class="note">{escape(damage)}.</p>'
    figures = [("step", f"{found['step']:,}")]
    if "samples" in found:
        figures.append(("samples", format_count(found["samples"])))
    if found.get("tokens"):
        figures.append(("tokens", format_count(found["tokens"])))
    figures.append(("time", format_seconds(run.end - run.begin)))
    if report.account.percent is not None:
        figures.append(("goodput", format_percent(report.account.percent)))
    figures.append(("ranks", str(found["world_size"])))
    figures.append(("recoveries", str(sum(not is_planned(one) for one in found["recoveries"]))))
    for name, series in [*report.losses.items(), *report.quality.items()][:2]:
        good = series.finite.values
        figures.append((name, format_value(float(good[-1])) if len(good) else "not finite"))
    cells = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in figures)
    yield f'<dl class="figures">{cells}</dl>\n</header>'


def _each(series: Mapping[str, Series]) -> list[dict[str, Series]]:
    """In a chart of its own."""
    return [{name: one} for name, one in series.items()]


def _curves(
    report: Report,
    title: str,
    groups: Sequence[Mapping[str, Series]],
    charts: list[dict[str, Any]],
    *,
    from_zero: bool = False,
) -> Iterable[str]:
    """A section with a chart for each group."""
    drawn = [{name: one for name, one in group.items() if len(one.finite.steps)} for group in groups]
    yield f"<section>\n<h2>{title}</h2>"
    if not any(drawn):
        yield '<p class="soft">Nothing finite was logged yet.</p>'
    starts = [(mark.generation, mark.step or 0) for mark in report.timeline.starts[1:]]
    for some in filter(None, drawn):
        svg, data = chart(some, starts=starts, from_zero=from_zero)
        charts.append(data)
        keys = "".join(
            f'<li><span class="key k{number}"></span>{escape(name)}: {escape(in_words(one))}</li>'
            for number, (name, one) in enumerate(some.items())
        )
        readout = '<p class="readout soft" aria-live="polite"></p>'
        yield f'<figure><ul class="legend">{keys}</ul>{svg}{readout}</figure>'
    if title == "Loss" and any(drawn):
        yield (
            '<p class="note">Over finished steps. A line is the mean of its part of the steps, the band behind it reaches'
            " from the lowest to the highest value there. Dashed: a later start of the run.</p>"
        )
    yield "</section>"


def _account(report: Report) -> Iterable[str]:
    account = report.account
    yield "<section>\n<h2>Where the time went</h2>"
    if not account.total > 0:
        yield '<p class="soft">No time has passed yet.</p>\n</section>'
        return
    yield "<p>Every second of every node has one cause, and the causes add up.</p>"
    rows = []
    for cause, seconds, before in waterfall(account):
        x, width = 1000 * before / account.total, max(2.0, 1000 * seconds / account.total)
        bar = (
            f'<svg viewBox="0 0 1000 20" preserveAspectRatio="none" aria-hidden="true"><rect class="lane" width="1000"'
            f' height="20"/><rect class="c-{cause}" x="{min(x, 998):.1f}" width="{width:.1f}" height="20"/></svg>'
        )
        name = f'<span class="key k-{cause}"></span>{cause}'
        rows.append((name, bar, format_seconds(seconds), format_percent(100 * seconds / account.total), meaning(cause)))
    useful = sum(account.seconds[cause] for cause in USEFUL)
    body = "".join(
        f'<tr><th scope="row">{name}</th><td class="bar">{bar}</td><td class="n">{took}</td><td class="n">{share}</td>'
        f'<td class="soft">{what}</td></tr>'
        for name, bar, took, share, what in rows
    )
    yield (
        f'<div class="wide"><table><thead><tr><th>cause</th><th></th><th class="n">node time</th><th class="n">share</th>'
        f"<th></th></tr></thead><tbody>{body}</tbody><tfoot><tr><th>all</th><td></td>"
        f'<td class="n">{format_seconds(account.total)}</td><td class="n">100%</td>'
        f"<td>of which {format_seconds(useful)} got the run on: goodput {format_percent(100 * useful / account.total)}</td>"
        "</tr></tfoot></table></div>\n</section>"
    )


def _nodes(report: Report) -> Iterable[str]:
    run = report.timeline
    yield "<section>\n<h2>Nodes over time</h2>"
    if not run.rows:
        yield '<p class="soft">No node has told of itself yet.</p>\n</section>'
        return
    causes = "".join(
        f'<li><span class="key k-{cause}"></span>{cause}</li>'
        for cause, seconds, _ in waterfall(report.account)
        if seconds
    )
    yield f'<ul class="legend">{causes}</ul><div class="wide">{gantt(run)}</div>'
    yield (
        '<p class="note">Lines with g0, g1, … are where a start of the run began. Triangles above are failures, changes and'
        " ends, diamonds below are checkpoints.</p>\n</section>"
    )


def _recoveries(report: Report) -> Iterable[str]:
    found = report.changes
    yield "<section>\n<h2>Recoveries</h2>"
    if not found:
        yield '<p class="soft">None: nothing failed.</p>\n</section>'
        return
    rows = [
        [
            _after(report, one["time"] - one["seconds"]["total"]),
            cause_of(one),
            who(one),
            *(str(one[name]) for name in ("generation", "from_step", "resumed_step", "lost_steps")),
            one.get("source", ""),
            *(format_seconds(one["seconds"][p]) if p in one["seconds"] else "" for p in _PHASES),
        ]
        for one in found
    ]
    names = ["after", "cause", "goes on", "generation", "at step", "from step", "lost", "state"]
    yield from _table([*names, *(name.replace("_", " ") for name in _PHASES)], rows, text=(1, 2, 7))
    yield (
        '<p class="note">Lost: steps that were done again. State: what they went on from. Total: from then to the end of'
        " the next step.</p>"
    )
    yield "</section>"


def _checkpoints(report: Report) -> Iterable[str]:
    yield "<section>\n<h2>Checkpoints</h2>"
    if not report.checkpoints:
        yield '<p class="soft">None.</p>\n</section>'
        return
    rows = [
        [
            str(one.step),
            "" if one.time is None else _after(report, one.time),
            "" if one.seconds is None else format_seconds(one.seconds),
            "" if one.num_bytes is None else f"{format_count(one.num_bytes)}B",
            "there" if one.is_there else "deleted",
            one.path,
        ]
        for one in report.checkpoints
    ]
    yield from _table(["step", "after", "took", "size", "now", "path"], rows, text=(4, 5))
    yield "</section>"


def _events(report: Report) -> Iterable[str]:
    marks = report.timeline.marks
    rows = [
        [
            _after(report, mark.time),
            mark.kind,
            str(mark.generation),
            "" if mark.step is None else str(mark.step),
            mark.text,
        ]
        for mark in marks
        if mark.kind != "checkpoint"
    ]
    yield f"<details>\n<summary>Events ({len(rows)})</summary>"
    yield from _table(["after", "event", "generation", "step", ""], rows, text=(1, 4))
    yield "</details>"


def _others(report: Report) -> Iterable[str]:
    others = report.others
    if not others:
        return
    rows = []
    for name, one in [*others.items()][:_MAX_NAMES]:
        good = one.finite.values
        ends = [format_value(float(v)) for v in (good[0], good[-1], good.min(), good.max())] if len(good) else [""] * 4
        rows.append([name, _Html(sparkline(one)), *ends, str(len(one.values)), str(one.num_not_finite or "")])
    yield f"<details>\n<summary>Everything else that was logged ({len(others)})</summary>"
    yield from _table(["name", "", "first", "last", "lowest", "highest", "values", "not finite"], rows, text=(0, 1))
    if len(others) > _MAX_NAMES:
        yield f'<p class="note">{len(others) - _MAX_NAMES} more names are in <code>metrics/</code>.</p>'
    yield "</details>"


def _about(report: Report) -> Iterable[str]:
    rows = [[name, value] for name, value in facts(report)]
    rows.append(["report made", datetime.fromtimestamp(report.now, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")])
    yield "<details>\n<summary>About this run</summary>"
    yield from _table(["", ""], rows, text=(0, 1))
    yield "</details>"


# ---- parts ---------------------------------------------------------------------------------------------------------


class _Html(str):
    """What is HTML already."""


def _cell(text: str) -> str:
    return text if isinstance(text, _Html) else escape(text)


def _table(names: Sequence[str], rows: Sequence[Sequence[str]], *, text: Sequence[int]) -> Iterable[str]:
    """Cells are text, but for :class:`_Html`; columns other than those in ``text`` are numbers.

    Only the last rows of many are shown.
    """
    kinds = [' class="t"' if column in text else ' class="n"' for column in range(len(names))]
    heads = "".join(f'<th scope="col"{kind}>{name}</th>' for name, kind in zip(names, kinds, strict=True))
    kind = "wide dense" if len(names) > 8 else "wide"
    yield f'<div class="{kind}"><table><thead><tr>{heads}</tr></thead><tbody>'
    for row in rows[-_MAX_ROWS:]:
        yield "<tr>" + "".join(f"<td{kind}>{_cell(cell)}</td>" for cell, kind in zip(row, kinds, strict=True)) + "</tr>"
    yield "</tbody></table></div>"
    if len(rows) > _MAX_ROWS:
        yield f'<p class="note">{len(rows) - _MAX_ROWS} earlier ones are left out here.</p>'


def _after(report: Report, time: float) -> str:
    return format_seconds(max(0.0, time - report.timeline.begin))
