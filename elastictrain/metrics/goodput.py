"""Goodput: every second of every node has one cause, and the causes add up.

:class:`TimeBook` keeps this node's account while it runs: whoever knows what the time since the last entry went into says
so, which leaves no second out and none counted twice. What it says goes into the run's ledger
(:mod:`elastictrain.metrics.ledger`), and :func:`goodput` makes the account of all nodes and all starts from the ledger
alone, whoever asks, so that it survives every process.

Only then is known what was in vain: steps that a later start did again were productive when they were done, and are
``replayed`` from the moment that start begins. Where a node's account has a hole, because a process died with what it had
not written yet, the agent that watched it knows when it died and how many steps it had done: these were steps, and what is
not even known to be that is ``unknown``. Where the agent died as well, there may be signs of life, which say how far
it had come by then.

A node's time begins with its agent's process and ends with it, or with the last thing known of it: the last word of
its agent (:mod:`elastictrain.metrics.presence`), or when the others had lost it. What comes before and behind the accounts
of its workers is what the agent says it did; a node that was lost went on with what it was last known to do. Nothing here
can fail, but for storage that does not answer.
"""

from __future__ import annotations

import bisect
import itertools
import math
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from elastictrain.metrics.presence import pieces

CAUSES = {
    "productive": "steps that count",
    "validation": "validation",
    "startup": "starting and ending, where nothing had failed",
    "compile": "the first step of a start with compiled blocks",
    "data": "waiting for data",
    "checkpoint": "training stood still for a checkpoint",
    "detect": "from a failure to the end of the workers that it left",
    "rendezvous": "finding the other nodes again",
    "rebuild": "starting workers again, building the model",
    "restore": "reading a checkpoint",
    "replayed": "steps that were done again, because a failure lost them",
    "waiting": "waiting for nodes before the first start, standing by",
    "straggling": "waiting for slower ranks",
    "unknown": "nobody knows",
}
ENDING = 10.0  # seconds of an agent's account after its workers' last word that may be their end and no hang
USEFUL = ("productive", "validation")

Seconds = dict[str, float]


class TimeBook:
    """One node's account of its own time, kept by one process.

    Args:
        since: when it begins, in seconds since the epoch; None: now.

    Attributes:
        began: when it begins.
        seconds: by cause, all of it up to the last entry.
        doing: the cause of what is going on now, for those who only know that it goes on.
        building: the cause of building the model: the first start of a node, or another one after a failure.
    """

    def __init__(self, since: float | None = None) -> None:
        self._offset = time.time() - time.monotonic()  # a clock that is set must not break the sum
        self.began = self._mark = self._now() if since is None else min(since, self._now())
        self.doing = self.building = "startup"
        self.seconds: Seconds = dict.fromkeys(CAUSES, 0.0)
        self._taken = dict(self.seconds)
        self._taken_at = self._mark

    @classmethod
    def begin(cls, history: Mapping[str, float]) -> TimeBook:
        """An account that goes back to what the agent knows: see ``Assignment.history``."""
        if "started" not in history:
            return cls()
        again = "ended" in history
        book = cls(history["ended" if again else "started"])
        book.spend("detect" if again else "startup", until=history["began"])
        if again and "stood_by" in history:
            book.spend("rendezvous", until=history["stood_by"])
            again = False
        book.spend("rendezvous" if again else "waiting", until=history["formed"])
        book.doing = book.building = "rebuild" if "ended" in history else "startup"
        return book

    def spend(self, cause: str, *, until: float | None = None) -> None:
        """Everything since the last entry had this cause."""
        self.split({}, rest=cause, until=until)

    def split(self, parts: Mapping[str, float], *, rest: str, until: float | None = None) -> None:
        """Of the time since the last entry so many seconds had these causes, as far as they go, and the rest another."""
        now = self._now()
        until = now if until is None else max(self._mark, min(until, now))
        left, self._mark = until - self._mark, until
        for cause, seconds in parts.items():
            seconds = min(max(seconds, 0.0), left)
            self.seconds[cause] += seconds
            left -= seconds
        self.seconds[rest] += left

    def settle(self, **parts: float) -> None:
        """Since the last entry goes on what is going on, but for so many seconds that had other causes."""
        self.split(parts, rest=self.doing)

    def broke_off(self, *, is_lost_peer: bool = False) -> None:
        """An error ended what was going on: what steps took since the last entry, and what follows, nobody knows.

        Args:
            is_lost_peer: by others, which are gone: what follows is until this node's agent has seen it, too.
        """
        self.doing = "unknown" if self.doing in ("productive", "compile") else self.doing
        self.settle()
        if is_lost_peer:
            self.doing = "detect"

    def move(self, seconds: float, *, source: str, to: str) -> None:
        """It turned out that so many seconds of one cause had another."""
        seconds = min(max(seconds, 0.0), self.seconds[source] - self._taken[source])
        self.seconds[source] -= seconds
        self.seconds[to] += seconds

    def take(self) -> dict[str, Any]:
        """The entries since the last call, for the ledger: ``{"from", "to", "seconds"}``."""
        spent = {cause: self.seconds[cause] - self._taken[cause] for cause in CAUSES}
        line = {"from": self._taken_at, "to": self._mark, "seconds": {c: s for c, s in spent.items() if s}}
        self._taken, self._taken_at = dict(self.seconds), self._mark
        return line

    def _now(self) -> float:
        return time.monotonic() + self._offset


# ---- from the ledger -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stretch:
    """What one node did for a while.

    Args:
        generation: the start of the run that it belongs to.
        start, stop: seconds since the epoch.
        first, last: finished steps at its beginning and end.
    """

    node: str
    generation: int
    start: float
    stop: float
    first: int
    last: int
    seconds: Seconds


@dataclass(frozen=True)
class Goodput:
    """Node-seconds by cause."""

    seconds: Seconds = field(default_factory=lambda: dict.fromkeys(CAUSES, 0.0))

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    @property
    def percent(self) -> float | None:
        """The useful share; None where no time has passed."""
        return 100.0 * sum(self.seconds[cause] for cause in USEFUL) / self.total if self.total > 0 else None

    @property
    def lost(self) -> Seconds:
        """What was not useful, without causes that took no time."""
        return {cause: s for cause, s in self.seconds.items() if cause not in USEFUL and s > 0}

    def plus(self, seconds: Iterable[float]) -> Goodput:
        """With more seconds, in the order of :data:`CAUSES`."""
        return Goodput({c: old + new for (c, old), new in zip(self.seconds.items(), seconds, strict=True)})


def goodput(lines: Iterable[Mapping[str, Any]]) -> Goodput:
    """The account of a run, from the lines of its ledger."""
    return summed(stretches(lines))


def summed(found: Iterable[Stretch]) -> Goodput:
    """The account of some nodes' time."""
    total = dict.fromkeys(CAUSES, 0.0)
    for stretch in found:
        for cause, seconds in stretch.seconds.items():
            total[cause if cause in total else "unknown"] += seconds
    return Goodput(total)


def stretches(lines: Iterable[Mapping[str, Any]]) -> list[Stretch]:
    """Every node's time without holes, in order, with what was done in vain told as that."""
    lines = list(lines)
    resumed = _Resumed(lines)
    reached = {(line["node"], line["generation"]): line["reached"] for line in lines if line["event"] == "node"}
    by_node: dict[str, list[Stretch]] = {}
    newest: dict[tuple[str, int], Stretch] = {}
    for line in lines:
        if line["event"] == "time":
            seconds = {cause: float(s) for cause, s in line["seconds"].items()}
            who = line["node"], line["generation"]
            first, last = line["steps"]
            made = Stretch(*who, line["from"], line["to"], first, last, seconds)
            by_node.setdefault(made.node, []).append(made)
            newest[who] = max(newest.get(who, made), made, key=lambda stretch: stretch.stop)
    for heard in _heard(lines, newest):
        by_node[heard.node].append(heard)
    agents = _Agents(lines)
    found: list[Stretch] = []
    for node in dict.fromkeys([*by_node, *agents.nodes]):
        mine: list[Stretch] = []
        for stretch in sorted(by_node.get(node, ()), key=lambda s: (s.start, s.stop)):
            mine += _joined(mine[-1] if mine else None, stretch, reached)
        found += agents.completed(node, mine)
    return [_judged(stretch, resumed) for stretch in found]


def _heard(lines: Iterable[Mapping[str, Any]], newest: Mapping[tuple[str, int], Stretch]) -> Iterator[Stretch]:
    """What is not in a node's account yet, or never will be, and known by its signs of life: steps, or what it was doing."""
    signs: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    for line in lines:
        if line["event"] == "alive":
            signs.setdefault((line["node"], line["generation"]), []).append(line)
    for who, mine in signs.items():
        at, reached = (newest[who].stop, newest[who].last) if who in newest else (math.inf, 0)
        for sign in sorted(mine, key=lambda sign: float(sign["time"])):
            if (now := sign["time"]) > at:
                step = max(reached, sign["step"])
                yield Stretch(
                    *who, at, now, reached, step, {"productive" if step > reached else sign["doing"]: now - at}
                )
                at, reached = now, step


def _joined(before: Stretch | None, new: Stretch, reached: Mapping[tuple[str, int], int]) -> list[Stretch]:
    """``new``, and the hole between it and the one before."""
    if before is None:
        return [new]
    if new.start < before.stop:  # a clock was set
        stop = max(new.stop, before.stop)
        share = (stop - before.stop) / (new.stop - new.start) if new.stop > new.start else 0.0
        return [replace(new, start=before.stop, stop=stop, seconds={c: s * share for c, s in new.seconds.items()})]
    if new.start == before.stop:
        return [new]
    last, cause = before.last, "unknown"
    if new.generation > before.generation and reached.get((new.node, new.generation), -1) > last:
        last, cause = reached[new.node, new.generation], "productive"
    hole = Stretch(
        new.node, before.generation, before.stop, new.start, before.last, last, {cause: new.start - before.stop}
    )
    return [hole, new]


class _Agents:
    """What is known of nodes beside what their workers have told: by their agents, and by the others that lost them."""

    def __init__(self, lines: Iterable[Mapping[str, Any]]) -> None:
        lines = list(lines)
        lives: dict[tuple[str, float], Mapping[str, Any]] = {}  # the newest line of each
        for line in lines:
            if line["event"] == "agent":
                who = line["node"], line["from"]
                lives[who] = max(lives.get(who, line), line, key=lambda one: float(one["to"]))
        self.nodes: dict[str, list[Mapping[str, Any]]] = {}
        for (node, _), line in sorted(lives.items()):
            self.nodes.setdefault(node, []).append(line)
        called = {(line.get("host"), line.get("agent_pid")): line["node"] for line in lines if line["event"] == "node"}
        gone = [line for line in lines if line["event"] == "gone"]
        self._gone = {called.get((line["host"], line["agent_pid"])): float(line["time"]) for line in gone}

    def completed(self, node: str, told: list[Stretch]) -> list[Stretch]:
        """What its workers have told, with what came before and behind it."""
        lives = self.nodes.get(node, [])
        known = [piece for line in lives for piece in pieces(line)]
        if not told:
            return [Stretch(node, 0, start, stop, 0, 0, {cause: stop - start}) for start, stop, cause in known]
        told = [part for stretch in told for part in _without(stretch, lives)]
        begin, step, early = told[0].start, told[0].first, told[0].generation
        before = [(start, min(stop, begin), cause) for start, stop, cause in known if start < begin]
        opening = [
            Stretch(node, early, start, stop, step, step, {cause: stop - start}) for start, stop, cause in before
        ]
        return [*opening, *told, *self._behind(told[-1], lives, known)]

    def _behind(
        self, last: Stretch, lives: list[Mapping[str, Any]], known: list[tuple[float, float, str]]
    ) -> Iterator[Stretch]:
        reached, has_ended = (
            max((line["reached"] for line in lives), default=-1),
            any(line["ended"] for line in lives[-1:]),
        )
        at = last
        for start, stop, cause in known:
            if stop > last.stop:
                step = max(at.last, reached) if cause == "productive" else at.last
                if cause == "productive" and step == last.last and has_ended:  # all steps were told
                    cause = "startup" if stop - last.stop <= ENDING else "unknown"
                at = _went_on(at, max(start, last.stop), stop, cause, step)
                yield at
        # The others may notice late; it has not outlived the time when it would have spoken again.
        gone = min(
            [self._gone.get(last.node, 0.0), *(line["to"] + line["beat"] * (not line["ended"]) for line in lives[-1:])]
        )
        if gone > at.stop:
            doing = max(at.seconds, key=lambda c: (c == "productive", at.seconds[c]), default="unknown")
            yield _went_on(at, at.stop, gone, doing, at.last)


def _without(stretch: Stretch, lives: list[Mapping[str, Any]]) -> list[Stretch]:
    """What nobody has told, but for the time between two lives: a container that comes back has the same name and pid."""
    if set(stretch.seconds) != {"unknown"}:
        return [stretch]
    parts = [stretch]
    for before, after in itertools.pairwise(lives):
        one = parts[-1]
        if one.start <= before["to"] < after["from"] <= one.stop:
            parts[-1:] = [
                replace(one, stop=before["to"], last=one.first, seconds={"unknown": before["to"] - one.start}),
                replace(one, start=after["from"], seconds={"unknown": one.stop - after["from"]}),
            ]
    return parts


def _went_on(after: Stretch, start: float, stop: float, cause: str, step: int) -> Stretch:
    return Stretch(after.node, after.generation, start, stop, after.last, step, {cause: stop - start})


class _Resumed:
    """From which steps on later starts went."""

    def __init__(self, lines: Iterable[Mapping[str, Any]]) -> None:
        starts = sorted((line["generation"], line["step"]) for line in lines if line["event"] == "start")
        self._generations = [generation for generation, _ in starts]
        least = itertools.accumulate((step for _, step in reversed(starts)), min)
        self._least = [*least][::-1]  # of this start and all later ones

    def after(self, generation: int) -> float:
        """The first step from which a start after this one went on; infinite where there is none."""
        index = bisect.bisect_right(self._generations, generation)
        return self._least[index] if index < len(self._least) else math.inf


def _judged(stretch: Stretch, resumed: _Resumed) -> Stretch:
    """With the steps that a later start did again as replayed, and their validation."""
    kept = resumed.after(stretch.generation)
    if kept >= stretch.last:
        return stretch
    steps = stretch.last - stretch.first
    vain = (stretch.last - max(kept, stretch.first)) / steps if steps else 1.0
    seconds = dict(stretch.seconds)
    for cause in USEFUL:
        if cause in seconds:
            lost = vain * seconds[cause]
            seconds |= {cause: seconds[cause] - lost, "replayed": seconds.get("replayed", 0.0) + lost}
    return replace(stretch, seconds=seconds)


class Recent:
    """Goodput of the last while.

    Args:
        window: seconds of wall clock.
    """

    def __init__(self, window: float = 600.0) -> None:
        self._window = window
        self._marks: deque[tuple[float, float, float]] = deque()  # when, useful and all seconds by then

    def percent(self, now: float, so_far: Goodput) -> float | None:
        """Of the window that ends now; None until some of it has passed."""
        useful, total = sum(so_far.seconds[cause] for cause in USEFUL), so_far.total
        marks = self._marks
        while len(marks) > 1 and marks[1][0] <= now - self._window:
            marks.popleft()
        _, useful_then, total_then = marks[0] if marks else (now, useful, total)
        if not marks or now - marks[-1][0] > self._window / 100:
            marks.append((now, useful, total))
        return 100.0 * (useful - useful_then) / (total - total_then) if total > total_then else None
