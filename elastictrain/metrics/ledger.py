"""The run directory's ledger of events: who started when and ended how, and where every node's time went.

Every start of a run writes ``events/g000003-start.jsonl`` once everything is ready, and ``events/g000003-end.jsonl`` when it
ends in good order: its limits reached, or stopped with its state saved. A start without an end was cut short. Between the
two each node writes segments ``events/g000003-000007-n001.jsonl``, whole new objects all of them, that are created once and
never changed. Every line is JSON with ``event`` and ``generation``:

| event | from | fields |
|---|---|---|
| ``start`` | rank 0 | ``time``, ``step``, ``world_size``, ``mesh`` |
| ``end`` | rank 0 | ``time``, ``step``, ``outcome`` |
| ``node`` | each node, when it starts | ``time``, ``name``, ``host``, ``agent_pid``, ``workers``, ``reached`` |
| ``time`` | each node | ``from``, ``to``, ``steps`` [first, last], ``samples``, ``tokens``, ``seconds`` by cause |
| ``alive`` | each node | ``time``, ``step``, ``samples``, ``tokens``, ``doing``, ``since`` |
| ``reading`` | rank 0, before the start | ``time``, ``source``, ``step``, ``num_bytes``, ``what``, ``wanted``, ``done`` |
| ``checkpoint`` | rank 0 | ``time``, ``step``, ``path``, ``seconds``, ``num_bytes`` |
| ``recovery`` | rank 0, a step on | ``time``, ``cause``, ``from_step``, ``resumed_step``, ``source``, ``seconds``, … |
| ``gone`` | rank 0, when it starts | ``time``, ``host``, ``agent_pid``: a node was lost then, or a little before |
| ``agent`` | each agent | see :mod:`elastictrain.metrics.presence`, which has them in a folder of their own |

A recovery with ``planned`` true is none: nodes joined or left in good order. ``source`` is what the state was read from: the
URL of a checkpoint, ``the snapshot of step 40 in memory``, or nothing. It also says who trains now: ``ranks``,
``mesh``, ``nodes`` and ``nodes_before``, of which one may be null. Lines of segments have ``node``, which tells one node's
agent from all others; times are in seconds since the epoch. ``reached`` is how many steps its workers had finished when
they ended before this start, as the agent saw it; -1 if that is not known.

A node writes on log steps, and where those are rare it says that it is ``alive``: after how many steps, what it is
``doing`` (a cause of time), and ``since`` when it has been at this step, as far as it was looked at. That is done by the
thread that writes, so that a long step, a validation or a compilation are no silence. A start that is ``reading`` its state
for long says so by :mod:`elastictrain.metrics.reading`: of ``what``, as many bytes as are ``wanted`` and ``done`` on rank 0.

So that what is read and written stays bounded, a node replaces every :data:`_MANY` of its segments by one with fewer lines,
and a later start all segments of earlier ones (``g000004-000000-sum.jsonl``): :mod:`elastictrain.metrics.condensed` has how,
and why no total changes and no crash in between matters.

On failure: an event that cannot be written is a warning; training does not depend on it. Segments wait in memory and are
tried again. A line that is cut or damaged is passed over, and counted by who asks (:func:`ledger_folder`).
"""

from __future__ import annotations

import json
import logging
import posixpath
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

from elastictrain.metrics import condensed, presence
from elastictrain.metrics.courier import LAST_INTERVAL, Courier, Writer, interval
from elastictrain.metrics.goodput import TimeBook
from elastictrain.metrics.lines import Folder, Line, stand_in
from elastictrain.metrics.record import Series
from elastictrain.rundir import RunDir, first_line

log = logging.getLogger(__name__)

FOLDER = "events"
_MANY = 64  # segments that become one
_MANY_ON_STORES = 12  # the same where whoever reads has to list them, which is slow
_STORE_INTERVAL = 60.0  # seconds between two of them there; a run is thought silent after twice as long
_FEW = 8  # lines of a node and an earlier start
_TOO_MANY = 4 * _MANY  # segments that cannot be deleted: more are not replaced


class Ledger:
    """The events of one start, as one node writes them.

    Args:
        generation: the number of this start among all of the run.
        number: of this node; rank 0's is 0.
        node: tells it, and its agent, from all others.
        counts: finished steps, samples and tokens by now; asked in the background, to say that this node is alive.
    """

    def __init__(
        self,
        run_dir: RunDir,
        *,
        generation: int,
        number: int = 0,
        node: str = "",
        counts: Callable[[], tuple[int, int, int]] | None = None,
    ) -> None:
        self._run_dir, self._generation, self._node = run_dir, generation, node
        self._pace = partial(interval, last=LAST_INTERVAL if run_dir.is_local else _STORE_INTERVAL)
        writers: list[Writer[Line]] = [_Segments(run_dir, generation=generation, number=number)]
        about: dict[str, Any] = {"what": "events", "max_items": 50_000, "pace": self._pace}
        self._courier = Courier(run_dir, writers, **about, idle=None if counts is None else self._alive)
        self._born = self._accounted = time.monotonic()
        self._steps = 0  # finished when the account was last written
        self._counts = counts
        self._book: TimeBook | None = None
        self._at = -1, time.time()  # the step that it was seen at, and since when

    def started(self, *, step: int, world_size: int, mesh: str = "") -> None:
        self._create("start", step=step, world_size=world_size, mesh=mesh)

    def ended(self, *, step: int, outcome: str) -> None:
        """``outcome``: "finished", "interrupt" or "preempt"."""
        self._create("end", step=step, outcome=outcome)

    def opened(self, book: TimeBook, *, step: int, reached: int, **about: Any) -> list[Line]:
        """This node takes part from ``step`` finished steps on.

        Returns:
            what that adds to the ledger: who it is, and that its account begins. What the book has so far follows it.
        """
        self._steps, self._book, self._at = step, book, (step, time.time())
        begins = {"steps": [step, step], "from": book.began, "to": book.began, "seconds": {}}
        lines = [self.note("node", time=time.time(), reached=reached, **about), self.note("time", **begins)]
        if (spent := book.take())["seconds"]:  # a start may take longer than what comes of it
            self.note("time", steps=[step, step], **spent)
        self._courier.flush()  # a node that dies at once was there, too
        return lines

    def note(self, event: str, **values: Any) -> Line:
        """Write something in the background."""
        line = {"event": event, "generation": self._generation, "node": self._node, **values}
        self._courier.put(line)
        return line

    def account(self, book: TimeBook, *, step: int, samples: int, tokens: int, now: bool = False) -> None:
        """Write where this node's time went since the last time, if it is due.

        Args:
            step: finished steps by now; so are ``samples`` and ``tokens`` what was used by now.
            now: it is due.
        """
        clock = time.monotonic()
        if not now and clock - self._accounted < self._pace(clock - self._born):
            return
        self._accounted, self._at = clock, (step, time.time())
        self.note("time", steps=[self._steps, step], samples=samples, tokens=tokens, **book.take())
        self._steps = step
        self._courier.flush()

    def _alive(self) -> Line:
        """In the background: a sign of life."""
        assert self._counts is not None
        now, (step, samples, tokens) = time.time(), self._counts()
        if step != self._at[0]:
            self._at = step, now
        line = {"event": "alive", "generation": self._generation, "node": self._node, "time": now, "step": step}
        doing = "startup" if self._book is None else self._book.doing
        return line | {"samples": samples, "tokens": tokens, "doing": doing, "since": self._at[1]}

    def flush(self, *, wait: float) -> None:
        """Write what there is by now; wait so many seconds for it at most."""
        self._courier.flush(wait=wait)

    def close(self) -> None:
        """Write what is left. Idempotent."""
        self._courier.close()

    def _create(self, event: str, **values: Any) -> None:
        line = {"event": event, "generation": self._generation, "time": time.time(), **values}
        try:
            self._run_dir.create(json.dumps(line).encode() + b"\n", FOLDER, f"g{self._generation:06d}-{event}.jsonl")
        except Exception as error:
            log.warning("the event %r could not be written to %s (%s)", event, self._run_dir, error)


class _Segments:
    """One object per write, and now and then one for all."""

    what = "events"

    def __init__(self, run_dir: RunDir, *, generation: int, number: int) -> None:
        self._run_dir, self._generation = run_dir, generation
        self._series = Series(run_dir, FOLDER, pattern=f"{{}}-n{number:03d}.jsonl", generation=generation)
        self._many = _MANY if run_dir.is_local else min(_MANY, _MANY_ON_STORES)
        self._lines: list[Line] = []  # of all objects that count
        self._names: list[str] = []  # of these
        self._obsolete: set[str] = set()  # those that the last of them stands for, and are not known to be deleted

    def write(self, items: Sequence[Line]) -> None:
        path = self._series.create("".join(json.dumps(line) + "\n" for line in items).encode())
        self._lines += items
        self._names.append(posixpath.basename(path))
        if len(self._names) >= self._many and len(self._obsolete) < _TOO_MANY:
            self._condense()

    def _condense(self) -> None:
        left = condensed.remove(self._run_dir, FOLDER, sorted(self._obsolete))
        lines = condensed.condense(self._lines, most=_MANY // 2)
        names = {*self._names, *left}
        try:
            path = self._series.create(stand_in(lines, names=names, generation=self._generation))
        except Exception as error:  # the lines are where they were
            log.info("events in %s are not condensed now (%s)", self._run_dir, first_line(error))
            self._obsolete = left
            return
        self._lines, self._names, self._obsolete = lines, [posixpath.basename(path)], names


def condense_earlier(run_dir: RunDir, generation: int) -> None:
    """Put one object in the place of all segments of the starts before number ``generation``, where there are many.

    Raises:
        OSError: or the driver's error: the storage does not answer. The ledger is as it was.
    """
    numbers = {name: condensed.generation_of(name) for name in run_dir.names(FOLDER)}
    earlier = {name for name, number in numbers.items() if number is not None and number < generation}
    if len(earlier) < _MANY:
        return
    found = ledger_folder(run_dir).look()
    earlier -= found.unfinished  # another process may be writing them
    left = condensed.remove(run_dir, FOLDER, sorted(found.obsolete & earlier))
    counting = earlier & found.lines.keys()
    if len(counting) < _MANY or len(left) >= _TOO_MANY:
        return
    starts = [line for lines in found.lines.values() for line in lines if line["event"] == "start"]
    lines = condensed.distinct([line for name in sorted(counting) for line in found.lines[name]])
    lines = condensed.condense(lines + starts, most=_FEW)
    lines = [line for line in lines if line["event"] != "start"]
    data = stand_in(lines, names={*counting, *left}, generation=generation)
    Series(run_dir, FOLDER, pattern="{}-sum.jsonl", generation=generation).create(data)


def fold_agents(run_dir: RunDir, generation: int) -> None:
    """Put what agents that are gone have said of themselves into one object, where there are many of them.

    Raises:
        OSError: or the driver's error. What is there twice counts once.
    """
    now = time.time()
    there = {name: line for name, line in presence.Agents(run_dir).look().items() if is_sound(line)}
    past = {name: line for name, line in there.items() if presence.is_past(line, now=now)}
    if len(past) >= _MANY:
        data = "".join(json.dumps(line) + "\n" for line in past.values()).encode()
        Series(run_dir, FOLDER, pattern="{}-agents.jsonl", generation=generation).create(data)
        presence.remove(run_dir, list(past))


def start_steps(run_dir: RunDir, *, after: int) -> dict[int, int]:
    """By the number of a start, the finished steps at which it began; those after number ``after``.

    Raises:
        OSError: or the driver's error: they cannot be read. Those that were cut while they were written are left out.
    """
    found: dict[int, int] = {}
    for name in run_dir.names(FOLDER):
        number = name[1:7]
        if name == f"g{number}-start.jsonl" and number.isdigit() and int(number) > after:
            try:
                found[int(number)] = int(run_dir.read_json(FOLDER, name)["step"])
            except (ValueError, KeyError, TypeError):
                continue
    return found


def num_cut_short(names: Collection[str]) -> int:
    """Starts that did not end in good order, by the names in :data:`FOLDER`."""
    starts = [name for name in names if name.endswith("-start.jsonl")]
    return sum(name.replace("-start.", "-end.") not in names for name in starts)


def ledger_folder(run_dir: RunDir) -> Folder:
    """The lines of the ledger, for one who looks more than once."""
    agents = presence.Agents(run_dir)
    return Folder(run_dir, FOLDER, is_sound=is_sound, distinct=condensed.distinct, beside=agents.read)


def read_ledger(run_dir: RunDir) -> list[Line]:
    """All lines of the ledger that count, in the order of their objects' names; damaged ones are passed over."""
    return ledger_folder(run_dir).read()


# ---- what a line must have -----------------------------------------------------------------------------------------


def is_sound(line: Line) -> bool:
    """Whether a line is one of the ledger: with all that its event says. Events that nobody knows here are."""
    event = line.get("event")
    if not isinstance(event, str) or not _is_count(line.get("generation")):
        return False
    if not all(is_one(line.get(name)) for name, is_one in _FIELDS.get(event, {}).items()):
        return False
    if not all(is_one(line[name]) for name, is_one in _ANY.items() if name in line):
        return False
    if event in ("time", "alive") and not all(_is_count(line.get(name, 0)) for name in _USED):
        return False
    return event not in ("time", "agent") or line["from"] <= line["to"]


def is_change(line: Mapping[str, Any]) -> bool:
    """Whether it tells of a change of who trains: a recovery, or another event that says as much as one."""
    return "time" in line and is_sound({**line, "event": "recovery"})


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _is_reached(value: Any) -> bool:
    return value == -1 or _is_count(value)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and -1e18 < value < 1e18


def _is_time(value: Any) -> bool:
    return _is_number(value) and value >= 0


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_seconds(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_number, value.values()))


def _is_steps(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(_is_count, value))


def _is_total(value: Any) -> bool:
    return _is_seconds(value) and "total" in value


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_phases(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_phase, value))


def _is_phase(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and _is_text(value[0]) and _is_time(value[1])


def _is_workers(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, dict) and {"rank", "pid"} <= one.keys() for one in value)


_USED = ("samples", "tokens")  # not in the line that only opens an account
_ANY = {"time": _is_time, "from": _is_time, "to": _is_time, "step": _is_count}  # of any event, if they are there
_FIELDS: dict[str, dict[str, Callable[[Any], bool]]] = {
    "start": {"time": _is_time, "step": _is_count, "world_size": _is_count},
    "end": {"time": _is_time, "step": _is_count, "outcome": _is_text},
    "node": {"node": _is_text, "time": _is_time, "reached": _is_reached, "name": _is_text, "host": _is_text}
    | {"agent_pid": _is_count, "workers": _is_workers},
    "time": {"node": _is_text, "from": _is_time, "to": _is_time, "steps": _is_steps, "seconds": _is_seconds},
    "alive": {"node": _is_text, "time": _is_time, "step": _is_count, "doing": _is_text, "since": _is_time},
    "reading": {"time": _is_time, "source": _is_text, "step": _is_count, "what": _is_text}
    | dict.fromkeys(("num_bytes", "wanted", "done"), _is_count),
    "checkpoint": {"time": _is_time, "step": _is_count, "path": _is_text, "seconds": _is_number}
    | {"num_bytes": _is_number},
    "recovery": {"time": _is_time, "cause": _is_text, "from_step": _is_count, "resumed_step": _is_count}
    | {"lost_steps": _is_count, "seconds": _is_total},
    "gone": {"time": _is_time, "host": _is_text, "agent_pid": _is_count},
    "agent": {"node": _is_text, "name": _is_text, "host": _is_text, "agent_pid": _is_count, "from": _is_time}
    | {"to": _is_time, "beat": _is_time, "phases": _is_phases, "reached": _is_reached, "ended": _is_flag},
}
