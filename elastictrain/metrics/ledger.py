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
| ``checkpoint`` | rank 0 | ``time``, ``step``, ``path``, ``seconds``, ``num_bytes`` |
| ``recovery`` | rank 0, after a step | ``time``, ``cause``, ``from_step``, ``resumed_step``, ``lost_steps``, ``seconds`` |

Lines of segments have ``node``, which tells one node's agent from all others; times are in seconds since the epoch.
``reached`` is how many steps its workers had finished when they ended before this start, as the agent saw it; -1 if that is
not known.

On failure: an event that cannot be written is a warning; training does not depend on it. Segments wait in memory and are
tried again. A line that was cut by a crash is passed over.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Collection, Sequence
from typing import Any

from elastictrain.metrics.courier import Courier, Writer, interval
from elastictrain.metrics.goodput import TimeBook
from elastictrain.metrics.record import Series
from elastictrain.rundir import RunDir

log = logging.getLogger(__name__)

FOLDER = "events"

Line = dict[str, Any]


class Ledger:
    """The events of one start, as one node writes them.

    Args:
        generation: the number of this start among all of the run.
        number: of this node; rank 0's is 0.
        node: tells it, and its agent, from all others.
    """

    def __init__(self, run_dir: RunDir, *, generation: int, number: int = 0, node: str = "") -> None:
        self._run_dir, self._generation, self._node = run_dir, generation, node
        writers: list[Writer[Line]] = [_Segments(run_dir, generation=generation, number=number)]
        self._courier = Courier(run_dir, writers, what="events", max_items=50_000)
        self._born = self._accounted = time.monotonic()
        self._steps = 0  # finished when the account was last written

    def started(self, *, step: int, world_size: int, mesh: str = "") -> None:
        self._create("start", step=step, world_size=world_size, mesh=mesh)

    def ended(self, *, step: int, outcome: str) -> None:
        """``outcome``: "finished", "interrupt" or "preempt"."""
        self._create("end", step=step, outcome=outcome)

    def opened(self, book: TimeBook, *, step: int, reached: int, **about: Any) -> list[Line]:
        """This node takes part from ``step`` finished steps on.

        Returns:
            what that adds to the ledger: who it is, and that its account begins.
        """
        self._steps = step
        begins = {"steps": [step, step], "from": book.began, "to": book.began, "seconds": {}}
        return [self.note("node", time=time.time(), reached=reached, **about), self.note("time", **begins)]

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
        if not now and clock - self._accounted < interval(clock - self._born):
            return
        self._accounted = clock
        self.note("time", steps=[self._steps, step], samples=samples, tokens=tokens, **book.take())
        self._steps = step
        self._courier.flush()

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
    """One object per write."""

    what = "events"

    def __init__(self, run_dir: RunDir, *, generation: int, number: int) -> None:
        self._series = Series(run_dir, FOLDER, pattern=f"{{}}-n{number:03d}.jsonl", generation=generation)

    def write(self, items: Sequence[Line]) -> None:
        self._series.create("".join(json.dumps(line) + "\n" for line in items).encode())


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


def read_ledger(run_dir: RunDir) -> list[Line]:
    """All lines of the ledger, in the order of their objects' names."""
    names = [name for name in run_dir.names(FOLDER) if name.endswith(".jsonl")]
    lines: list[Line] = []
    for data in run_dir.read_all(FOLDER, names):
        for text in data.decode(errors="replace").splitlines():
            try:
                line = json.loads(text)
            except ValueError:
                continue
            if isinstance(line, dict) and "event" in line:
                lines.append(line)
    return lines
