"""The run directory's ledger of events: who started when, and who ended in good order.

Every start of a run writes ``events/g000003-start.jsonl`` once everything is ready, and ``events/g000003-end.jsonl`` when it
ends in good order: its limits reached, or stopped with its state saved. A start without an end was cut short. Each file is
one JSON line with ``event``, ``generation``, ``time`` (seconds since the epoch) and ``step``; it is created once and never
changed. Rank 0 alone writes.

On failure: an event that cannot be written is a warning; training does not depend on it.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Collection
from typing import Any

from elastictrain.rundir import RunDir

log = logging.getLogger(__name__)

FOLDER = "events"


class Ledger:
    """The events of one start.

    Args:
        generation: the number of this start among all of the run.
    """

    def __init__(self, run_dir: RunDir, *, generation: int) -> None:
        self._run_dir, self._generation = run_dir, generation

    def started(self, *, step: int, world_size: int) -> None:
        self._write("start", step=step, world_size=world_size)

    def ended(self, *, step: int, outcome: str) -> None:
        """``outcome``: "finished", "interrupt" or "preempt"."""
        self._write("end", step=step, outcome=outcome)

    def _write(self, event: str, **values: Any) -> None:
        line = {"event": event, "generation": self._generation, "time": time.time(), **values}
        try:
            self._run_dir.create(json.dumps(line).encode() + b"\n", FOLDER, f"g{self._generation:06d}-{event}.jsonl")
        except Exception as error:
            log.warning("the event %r could not be written to %s (%s)", event, self._run_dir, error)


def num_cut_short(names: Collection[str]) -> int:
    """Starts that did not end in good order, by the names in :data:`FOLDER`."""
    starts = [name for name in names if name.endswith("-start.jsonl")]
    return sum(name.replace("-start.", "-end.") not in names for name in starts)
