"""Signs of life of a start that reads its state for long, before it has an account: what it reads, and how far it is.

    events/g000004-reading-5f0c2a91-0003.jsonl

Only the newest one is there, and none once the state is read; a start that is killed meanwhile leaves its last one. They
carry the number that the start will have, so that they count only until it has begun.

On failure: a sign that cannot be written or removed is passed over; nothing depends on it.
"""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from elastictrain.metrics.console import format_count
from elastictrain.rundir import RunDir, first_line

log = logging.getLogger(__name__)

EVENT = "reading"
_FOLDER = "events"


class Signs:
    """Of one start.

    Args:
        generation: the number of this start among all of the run; asked with the first sign: it is a look at storage.
    """

    def __init__(self, run_dir: RunDir, *, generation: Callable[[], int]) -> None:
        self._run_dir, self._ask = run_dir, generation
        self._generation, self._unique = -1, uuid.uuid4().hex[:8]
        self._number, self._there = 0, ""

    def put(self, **values: Any) -> None:
        """The newest one, see the table of :mod:`elastictrain.metrics.ledger`."""
        before = self._there
        try:
            if self._generation < 0:
                self._generation = self._ask()
            line = {"event": EVENT, "generation": self._generation, "time": time.time(), **values}
            name = f"g{self._generation:06d}-{EVENT}-{self._unique}-{self._number:04d}.jsonl"
            self._run_dir.create(json.dumps(line).encode() + b"\n", _FOLDER, name)
        except Exception as error:
            log.info("a sign of life in %s was not written (%s)", self._run_dir, first_line(error))
            return
        self._number, self._there = self._number + 1, name
        self._remove(before)

    def clear(self) -> None:
        """The state is read."""
        self._remove(self._there)
        self._there = ""

    def _remove(self, name: str) -> None:
        if not name:
            return
        try:
            self._run_dir.fs.rm_file(self._run_dir.join(_FOLDER, name))
        except Exception as error:  # one small object more
            log.debug("%s stays (%s)", name, first_line(error))


def newest_sign(lines: Iterable[Mapping[str, Any]], *, after: int) -> Mapping[str, Any] | None:
    """Of a start whose number is more than ``after``; None: there is none."""
    signs = (line for line in lines if line["event"] == EVENT and line["generation"] > after)
    return max(signs, key=lambda line: float(line["time"]), default=None)


def in_words(sign: Mapping[str, Any]) -> str:
    """``step 1000: 3.21GB of 13.4GB of the model read``."""
    wanted = sign["wanted"]
    done, what = min(sign["done"], wanted), sign["what"]
    if done == wanted:
        return f"step {sign['step']}: {format_count(wanted)}B of the {what} read; to be put in place, on all ranks"
    return f"step {sign['step']}: {format_count(done)}B of {format_count(wanted)}B of the {what} read"
