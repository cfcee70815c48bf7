"""What earlier starts of a run spent, read from its ledger beside training; behind that, the ledger is made smaller.

Both are done by a thread, since a ledger has many objects, and by one at a time in a process: where that lives on after a
failure, the thread of an earlier generation may still wait for storage. What is over begins nothing more.

On failure: a ledger that cannot be read is a warning, and :attr:`Earlier.spent` stays None. That it cannot be made smaller
is no more than a note in the log.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Iterable, Mapping
from typing import Any

from elastictrain.metrics.goodput import Goodput, goodput
from elastictrain.metrics.ledger import condense_earlier, fold_agents, read_ledger
from elastictrain.metrics.lines import Line
from elastictrain.rundir import RunDir, first_line

log = logging.getLogger(__name__)

THREAD = "elastictrain-ledger"

_turn = threading.Lock()
_LOOK = 0.5  # seconds between two looks whether it is still wanted


class Earlier:
    """Begins to read at once.

    Args:
        begun: what this start's account began with, in the ledger.

    Attributes:
        spent: by all starts before this one; None until it has been read.
    """

    def __init__(self, run_dir: RunDir, begun: list[Line]) -> None:
        self._run_dir, self._begun = run_dir, begun
        self._is_over = False
        self.spent: Goodput | None = None
        threading.Thread(target=self._run, name=THREAD, daemon=True).start()

    def close(self) -> None:
        """Nobody wants it any more. Waits for nothing: storage may hang."""
        self._is_over = True

    def _run(self) -> None:
        while not _turn.acquire(timeout=_LOOK):
            if self._is_over:
                return
        try:
            self._read()
            if not self._is_over and self.spent is not None:
                self._condense()
        finally:
            _turn.release()

    def _read(self) -> None:
        try:
            self.spent = spent_before(read_ledger(self._run_dir), self._begun)
        except Exception as error:  # only what is logged as goodput depends on it
            log.warning("the ledger cannot be read (%s): goodput is not logged", first_line(error))

    def _condense(self) -> None:
        try:
            condense_earlier(self._run_dir, self._begun[0]["generation"])
            fold_agents(self._run_dir, self._begun[0]["generation"])
        except Exception as error:  # only how much is read the next time depends on it
            log.info("the ledger is not condensed (%s)", first_line(error))


def spent_before(lines: Iterable[Mapping[str, Any]], begun: list[Line]) -> Goodput:
    """By earlier starts, up to the beginning of this one: what this start has written meanwhile is known otherwise."""
    lines = list(lines)
    mine = max(line["generation"] for line in begun or lines)
    here = {line["node"] for line in lines if line["event"] == "node" and line["generation"] == mine}
    now = min((line["time"] for line in begun if "time" in line), default=math.inf)
    agents = [
        {**line, "to": min(line["to"], now), "ended": line["ended"] and line["to"] <= now}  # it may go on meanwhile
        for line in lines
        if line["event"] == "agent" and line["node"] not in here and line["from"] < now
    ]
    others = [line for line in lines if line["event"] != "agent"]
    there = [line for line in others if line["generation"] < mine or line["event"] in ("start", "node", "gone")]
    opening = [line for line in lines if line["generation"] == mine and line["event"] == "time" and not line["seconds"]]
    return goodput([*agents, *there, *opening, *begun])
