"""How a worker tells its agent why it ended, and how the agent tells the person: one error, the user's frames first.

A worker writes one JSON file before it exits and prints nothing. The agent reads all of them, finds the root cause
(:func:`root_cause`: the earliest that is not merely "I lost the others"), and prints it once. A report that cannot be
written or read is as good as none: the agent then knows the exit code alone. Imports no torch.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import site
import sysconfig
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import cache

import elastictrain
from elastictrain.elastic.membership import AgentMembership
from elastictrain.errors import (
    EXIT_CHANGED,
    EXIT_FAILED,
    EXIT_FINISHED,
    EXIT_PREEMPTED,
    EXIT_USAGE,
    NothingKept,
    UsageError,
    is_lost_peer,
)
from elastictrain.machine import write_whole

HINT = "; --full-traceback shows them"


@dataclass(frozen=True)
class Report:
    """Why one worker ended.

    Args:
        kind: "usage" (a :class:`~elastictrain.errors.UsageError`; ``message`` is the line for the person, empty where
            it is printed already), "exception", "exit" (the user's code called ``sys.exit``), "replace" (there is no
            state that this process could go on from: another one must begin), or "died" (made up by the agent for a
            process that left no report).
        error: the exception's class name.
        text: the traceback with the frames of frameworks folded; ``full`` with all of them.
        lost_peer: the exception says that another rank, or the network, is gone.
        retry: another attempt may help.
        time: seconds since the epoch.
    """

    kind: str
    rank: int
    step: int = 0
    error: str = ""
    message: str = ""
    where: str = ""
    text: str = ""
    full: str = ""
    lost_peer: bool = False
    retry: bool = True
    time: float = 0.0

    @property
    def line(self) -> str:
        """The error on one line: class, message, and the user's line that raised it."""
        message = " ".join(self.message.split())
        message = message if len(message) <= 200 else message[:197] + "…"
        return f"{self.error}{': ' if message else ''}{message}{f' ({self.where})' if self.where else ''}"

    def write(self, folder: str) -> None:
        """Leave the report for the agent, whole or not at all."""
        write_whole(os.path.join(folder, f"rank-{self.rank}.json"), asdict(self))

    @classmethod
    def read(cls, folder: str, rank: int) -> Report | None:
        """The report of a rank; None while there is none."""
        try:
            with open(os.path.join(folder, f"rank-{rank}.json"), encoding="utf-8") as file:
                return cls(**json.load(file))
        except (OSError, ValueError, TypeError):
            return None


def describe(error: BaseException, *, rank: int, step: int, retry: bool = True) -> Report:
    """The report of an exception that ended a worker."""
    if isinstance(error, UsageError):
        return Report("usage", rank, step, type(error).__name__, str(error), retry=False, time=time.time())
    if isinstance(error, NothingKept):
        return Report("replace", rank, step, type(error).__name__, str(error), time=time.time())
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
        message = error.code if isinstance(error.code, str) else f"sys.exit({code})"
        kind = "usage" if code == 2 else "exit"  # argparse and click have printed their line by then
        return Report(kind, rank, step, "SystemExit", "" if code == 2 else message, retry=False, time=time.time())
    whole = traceback.TracebackException.from_exception(error)
    full = "".join(whole.format())
    text = "".join(_fold(whole) or [full])
    once = text.find(HINT) + len(HINT)
    return Report(
        "exception",
        rank,
        step,
        type(error).__qualname__,
        str(error),
        where=_where(error),
        text=text if HINT not in text else text[:once] + text[once:].replace(HINT, ""),
        full=full,
        lost_peer=is_lost_peer(error),
        retry=retry,
        time=time.time(),
    )


def root_cause(reports: Iterable[Report]) -> Report | None:
    """The one to show: of those that are no mere consequence of another rank's end, the earliest."""
    return min(reports, key=lambda r: (r.lost_peer, r.kind != "usage", r.time, r.rank), default=None)


def guarded(mine: AgentMembership, body: Callable[[], None], *, retry: bool = True) -> int:
    """Run ``body`` as a worker must: whatever it raises becomes a report, and nothing is printed.

    Args:
        retry: what it raises may not happen again on another attempt.

    Returns:
        The worker's exit code.
    """
    try:
        body()
    except SystemExit as error:
        if error.code in (None, EXIT_FINISHED, EXIT_PREEMPTED):
            return EXIT_PREEMPTED if error.code else EXIT_FINISHED
        if error.code == EXIT_CHANGED and mine.stopped is not None and mine.stopped.goes_on:
            return EXIT_CHANGED
        raised: BaseException = error
    except BaseException as error:
        raised = error
    else:
        if mine.stopped is None:
            return EXIT_FINISHED
        return EXIT_CHANGED if mine.stopped.goes_on else EXIT_PREEMPTED
    if mine.is_over:
        return EXIT_FAILED
    report = describe(raised, rank=mine.rank, step=mine.step, retry=retry)
    with contextlib.suppress(FileNotFoundError):  # the generation has just ended
        report.write(mine.assignment.reports)
    return EXIT_USAGE if report.kind == "usage" else EXIT_FAILED


# ---- folding -------------------------------------------------------------------------------------------------------


@cache
def _homes() -> tuple[list[str], list[str], str]:
    """Where installed packages, the standard library and elastictrain live."""
    packages = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), site.getusersitepackages()}
    packages.update(site.getsitepackages() if hasattr(site, "getsitepackages") else ())
    stdlib = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    ours = os.path.dirname(os.path.abspath(elastictrain.__file__))
    return ([os.path.join(p, "") for p in packages if p], [os.path.join(p, "") for p in stdlib if p], ours + os.sep)


def owner(filename: str) -> str | None:
    """The framework that a source file belongs to; None for the user's own code."""
    packages, stdlib, ours = _homes()
    if filename.startswith("<") and not filename.startswith(("<stdin>", "<string>", "<ipython")):
        return "python"
    if filename.startswith(ours):
        return "elastictrain"
    for home in packages:
        if filename.startswith(home):
            return filename[len(home) :].split(os.sep)[0].removesuffix(".py").removeprefix("_")
    return "python" if any(filename.startswith(home) for home in stdlib) else None


def _fold(whole: traceback.TracebackException) -> list[str] | None:
    """The lines of a traceback with each run of framework frames folded into a count; None if none would be left."""
    if whole.exceptions is not None:  # an exception group is a tree: shown as it is
        return None
    lines: list[str] = []
    for link, text in (
        (whole.__cause__, "The above exception was the direct cause of the following exception:"),
        (None if whole.__suppress_context__ or whole.__cause__ else whole.__context__,
         "During handling of the above exception, another exception occurred:"),
    ):  # fmt: skip
        if link is not None:
            lines += [*(_fold(link) or link.format()), f"\n{text}\n\n"]
    chained = bool(lines)
    lines.append("Traceback (most recent call last):\n")
    mine = False
    for framework, frames in itertools.groupby(whole.stack, key=lambda frame: owner(frame.filename) is not None):
        if framework:
            lines.append(_count([owner(frame.filename) or "" for frame in frames]))
        else:
            lines += traceback.StackSummary.from_list(list(frames)).format()
            mine = True
    lines += whole.format_exception_only()
    return lines if mine or chained else None


def _count(frameworks: list[str]) -> str:
    *names, last = dict.fromkeys(frameworks)
    named = f"{', '.join(names)} and {last}" if names else last
    return f"  … {len(frameworks)} {'frame' if len(frameworks) == 1 else 'frames'} in {named}{HINT}\n"


def _where(error: BaseException) -> str:
    """``file.py:12`` of the innermost frame that is the user's."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if owner(frame.filename) is None:
            return f"{os.path.basename(frame.filename)}:{frame.lineno}"
    return ""
