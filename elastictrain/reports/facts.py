"""What a report tells, whatever it is told in: read from a run directory once, the rest computed from that.

On failure: a directory that holds no run is a :class:`~elastictrain.errors.UsageError` with the remedy; storage that does
not answer raises its own error. Damaged lines are passed over and counted; a ``run.json`` that is gone or damaged leaves out
what only it knows.
"""

from __future__ import annotations

import posixpath
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elastictrain import runfile
from elastictrain.errors import UsageError
from elastictrain.metrics import ledger
from elastictrain.metrics.console import format_count, format_percent, format_seconds, format_value
from elastictrain.metrics.goodput import CAUSES, USEFUL, Goodput, summed
from elastictrain.metrics.lines import Line, as_unicode
from elastictrain.metrics.series import ABOUT_THE_RUN, Series, read_series
from elastictrain.metrics.status import doing_in_words, is_planned, require_begun, status
from elastictrain.metrics.timeline import Mark, Timeline, timeline
from elastictrain.rundir import RunDir, without_user

_CHECKPOINTS = "checkpoints"
_MAX_CURVES = 6  # in one chart
_MAX_QUALITY = 3  # charts


@dataclass(frozen=True)
class Checkpoint:
    """One that was committed.

    Args:
        time: seconds since the epoch; with ``seconds`` and ``num_bytes`` None where the ledger does not know of it.
        is_there: still, or it has been deleted.
    """

    step: int
    path: str
    is_there: bool
    time: float | None = None
    seconds: float | None = None
    num_bytes: float | None = None


@dataclass(frozen=True)
class Report:
    """What there is to tell of a run.

    Args:
        url: of the run directory, as it may be shown.
        about: ``run.json``; empty where that cannot be read.
        status: as ``elastictrain status --json`` has it.
        changes: lines of the ledger about recoveries and what is like one, see
            :func:`~elastictrain.metrics.ledger.is_change`; in order of time.
        num_damaged: lines that were passed over, by folder, where there were any.
        now: seconds since the epoch.
    """

    url: str
    about: Mapping[str, Any]
    status: Mapping[str, Any]
    timeline: Timeline
    account: Goodput
    changes: tuple[Line, ...]
    series: Mapping[str, Series]
    checkpoints: tuple[Checkpoint, ...]
    num_damaged: Mapping[str, int]
    now: float

    @property
    def title(self) -> str:
        return str(self.about.get("target", posixpath.basename(self.url.rstrip("/")) or self.url))

    @property
    def losses(self) -> dict[str, Series]:
        """The curves that a person looks for first; they have the same unit."""
        names = sorted(
            (name for name in self._quality() if "loss" in name), key=lambda name: ("train" not in name, name)
        )
        return {name: self.series[name] for name in names[:_MAX_CURVES]}

    @property
    def quality(self) -> dict[str, Series]:
        """What else tells how well it goes, validation first; each has a unit of its own."""
        names = sorted(
            (name for name in self._quality() if "loss" not in name), key=lambda name: ("val" not in name, name)
        )
        return {name: self.series[name] for name in names[:_MAX_QUALITY]}

    def _quality(self) -> list[str]:
        return [name for name in self.series if not name.startswith((*ABOUT_THE_RUN, "lr/"))]

    @property
    def rates(self) -> dict[str, Series]:
        """How fast it goes, in tokens where there are any."""
        for name in ("throughput/tokens_per_second", "throughput/samples_per_second"):
            if name in self.series:
                return {name: self.series[name]}
        return {}

    @property
    def others(self) -> dict[str, Series]:
        """What has no curve of its own."""
        shown = {*self.losses, *self.quality, *self.rates}
        return {name: series for name, series in sorted(self.series.items()) if name not in shown}


# ---- reading -------------------------------------------------------------------------------------------------------


def read_report(run_dir: RunDir, *, now: float | None = None) -> Report:
    """Everything that a report tells.

    Raises:
        UsageError: there is no run, or none that has begun to train.
        OSError: or the driver's error: storage does not answer.
    """
    folder = ledger.ledger_folder(run_dir)
    lines = folder.read()
    require_begun(run_dir, lines)
    try:
        about = as_unicode(runfile.read(run_dir) or {})
    except UsageError:
        about = {}
    starts = {line["generation"]: line["step"] for line in lines if line["event"] == "start"}
    series, num_damaged = read_series(run_dir, starts=starts)
    now = time.time() if now is None else now
    run = timeline(lines)
    account = summed(stretch for row in run.rows for stretch in row.stretches)
    damaged = {"events": folder.num_damaged, "metrics": num_damaged}
    return Report(
        url=as_unicode(str(run_dir)),
        about=about,
        status=status(lines, now=now, account=account),
        timeline=run,
        account=account,
        changes=tuple(sorted(filter(ledger.is_change, lines), key=lambda line: line["time"])),
        series=series,
        checkpoints=tuple(_checkpoints(lines, _committed(run_dir), run_dir)),
        num_damaged={name: count for name, count in damaged.items() if count},
        now=now,
    )


def _committed(run_dir: RunDir) -> set[str]:
    """Attempts with their COMMIT, as ``step-…/attempt``."""
    root = run_dir.join(_CHECKPOINTS)
    run_dir.fs.invalidate_cache(root)
    try:
        paths = run_dir.fs.find(root)
    except FileNotFoundError:
        return set()
    return {posixpath.join(*path.split("/")[-3:-1]) for path in map(str, paths) if posixpath.basename(path) == "COMMIT"}


def _checkpoints(lines: list[Line], there: set[str], run_dir: RunDir) -> list[Checkpoint]:
    """In the order of steps: those of the ledger, and those that only storage knows."""
    found, told = [], set()
    for line in lines:
        if line["event"] == "checkpoint":
            name = posixpath.join(*line["path"].rstrip("/").split("/")[-2:])
            known = {key: line[key] for key in ("time", "seconds", "num_bytes")}
            found.append(Checkpoint(line["step"], without_user(line["path"]), name in there, **known))
            told.add(name)
    for name in there - told:
        digits = name.split("/")[0].removeprefix("step-")
        if digits.isdecimal():
            found.append(Checkpoint(int(digits), run_dir.join(_CHECKPOINTS, name), True))
    return sorted(found, key=lambda one: (one.step, one.time or 0.0))


# ---- in words ------------------------------------------------------------------------------------------------------

_MEANING = {
    "running": "running",
    "silent": "silent: killed, getting ready for long, or without its run directory; if killed, the same command goes on"
    " with it",
    "starting": "starting: another start reads the state",
    "changing": "changing: nodes join or leave",
    "finished": "finished",
    "interrupted": "interrupted, with everything saved; the same command goes on with it",
    "preempted": "preempted, with everything saved; the same command goes on with it",
}


def facts(report: Report) -> list[tuple[str, str]]:
    """Names and values, the most important first."""
    found, account, run = report.status, report.account, report.timeline
    state = _MEANING.get(found["state"], found["state"])
    seen = f"last seen {format_seconds(max(0.0, report.now - found['seen']))} ago"
    trained = f"step {found['step']}"
    if "samples" in found:
        trained += f", {format_count(found['samples'])} samples"
        trained += f", {format_count(found['tokens'])} tokens" if found["tokens"] else ""
    nodes = len(found["nodes"])
    ranks = f"{found['world_size']}" + (f" on {nodes} nodes" if nodes > 1 else "")
    rows = [("state", f"{state}; {seen}"), ("trained", trained)]
    if (doing := doing_in_words(found, now=report.now)) is not None:
        rows.append(("now", doing))
    if account.percent is not None:
        rows.append(("goodput", f"{format_percent(account.percent)} of {format_seconds(account.total)} on all nodes"))
    rows.append(("time", f"{format_seconds(run.end - run.begin)} from the first start to the last sign of life"))
    rows.append(("ranks", f"{ranks}" + (f" ({found['mesh']})" if found["mesh"] else "")))
    rows.append(("starts", _starts(len(run.starts), found["recoveries"])))
    for name, series in [*report.losses.items(), *report.quality.items()]:
        rows.append((name, in_words(series)))
    rows.append(("run directory", report.url))
    return rows + _what(report.about)


def _starts(num: int, recoveries: Sequence[Mapping[str, Any]]) -> str:
    """``5, of them 2 after a failure, 1 after a planned change``."""
    planned = sum(map(is_planned, recoveries))
    told = ((len(recoveries) - planned, "a failure"), (planned, "a planned change"))
    after = [f"{count} after {what}" for count, what in told if count]
    return f"{num}, of them {', '.join(after)}" if after else str(num)


def _what(about: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = []
    settings = about.get("settings")
    if isinstance(settings, dict) and settings:
        rows.append(("settings", ", ".join(f"{name}={value}" for name, value in settings.items())))
    sizes = {"global batch": about.get("global_batch_size"), "microbatch": about.get("micro_batch_size")}
    sizes |= {"seed": about.get("seed")}
    if told := ", ".join(f"{name} {value}" for name, value in sizes.items() if value is not None):
        rows.append(("batch", told))
    versions = about.get("versions")
    if isinstance(versions, dict):
        rows.append(("versions", ", ".join(f"{name} {value}" for name, value in versions.items())))
    if about.get("created"):
        rows.append(("created", str(about["created"])))
    return rows


def in_words(series: Series) -> str:
    """``5.61 → 1.35 (lowest 1.3 at step 280)``."""
    good = series.finite
    if not len(good.values):
        return f"not finite, {len(series.values)} times"
    first, last, best = good.values[0], good.values[-1], int(good.values.argmin())
    text = format_value(float(last)) if len(good.values) == 1 else f"{format_value(first)} → {format_value(last)}"
    text += f" (lowest {format_value(good.values[best])} at step {good.steps[best]:.0f})"
    return text + (f", {series.num_not_finite} not finite" if series.num_not_finite else "")


def mark_in_words(mark: Mark, run: Timeline) -> str:
    """``after 3m12s: start, generation 2 at step 40: 4 ranks``."""
    step = "" if mark.step is None else f" at step {mark.step}"
    when = format_seconds(max(0.0, mark.time - run.begin))
    return f"after {when}: {mark.kind}, generation {mark.generation}{step}: {mark.text}"


def cause_of(change: Mapping[str, Any]) -> str:
    """Why who trains has changed, with a word where that was planned."""
    return f"{change['cause']} (planned)" if is_planned(change) else str(change["cause"])


def who(change: Mapping[str, Any]) -> str:
    """Who trains after a change: ``4 → 3 nodes, 6 ranks``; empty where the line does not say it."""
    before, nodes, ranks = (change.get(name) for name in ("nodes_before", "nodes", "ranks"))
    told = []
    if nodes is not None and (nodes != 1 or before not in (None, 1)):
        told.append(f"{before} → {nodes} nodes" if before not in (None, nodes) else f"{nodes} nodes")
    return ", ".join([*told, *([f"{ranks} rank{'s' * (ranks != 1)}"] if ranks is not None else [])])


def waterfall(account: Goodput) -> list[tuple[str, float, float]]:
    """Where all node-seconds went: cause, seconds, and the sum of those before it; the useful ones first.

    What was lost is in the order of its size. The last row ends at the account's total.
    """
    lost = sorted(account.lost.items(), key=lambda item: -item[1])
    rows, before = [], 0.0
    for cause, seconds in [*((cause, account.seconds[cause]) for cause in USEFUL), *lost]:
        if seconds > 0:
            rows.append((cause, seconds, before))
            before += seconds
    return rows


def meaning(cause: str) -> str:
    return CAUSES.get(cause, "")


def damage_in_words(report: Report) -> str | None:
    """``3 damaged lines were passed over (events 1, metrics 2)``; None where there are none."""
    total = sum(report.num_damaged.values())
    if not total:
        return None
    where = ", ".join(f"{name} {count}" for name, count in report.num_damaged.items())
    return f"{total} damaged line{' was' if total == 1 else 's were'} passed over ({where})"
