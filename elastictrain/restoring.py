"""A start that reads its state for long says what it reads, and how far it is: on rank 0's terminal, and in the ledger.

A thread looks at what this rank's reads have counted. Nothing is said of a read that is done within :data:`FIRST` seconds,
as nearly all are; then a line now and then, ever more rarely.

On failure: what cannot be said or written is left out; reading depends on none of it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

from elastictrain.checkpoint import CheckpointReader
from elastictrain.metrics.console import format_count, make_console, print_line
from elastictrain.metrics.reading import Signs, in_words
from elastictrain.rundir import without_user

FIRST = 2.0  # seconds of reading before anything is said
EVERY, LONGEST = 10.0, 60.0  # between two lines: at first, and at most
GROWTH = 1.5
END_SECONDS = 1.0  # for a sign that is just being written


class Restoring:
    """Of one start, on rank 0.

    Args:
        signs: for whoever looks from outside; None: nobody can.
    """

    def __init__(self, signs: Signs | None = None) -> None:
        self._signs, self._is_named = signs, False

    @contextlib.contextmanager
    def of(self, what: str, reader: CheckpointReader) -> Iterator[None]:
        """While ``what`` is read."""
        end, before = threading.Event(), (reader.progress.wanted, reader.progress.done)
        how: dict[str, Any] = {"name": "elastictrain-reading", "daemon": True}
        teller = threading.Thread(target=self._tell, args=(what, reader, before, end), **how)
        teller.start()
        try:
            yield
        finally:
            end.set()
            teller.join(END_SECONDS)

    def _tell(self, what: str, reader: CheckpointReader, before: tuple[int, int], end: threading.Event) -> None:
        progress, pause, is_due = reader.progress, EVERY, time.monotonic() + FIRST
        while not end.wait(max(0.0, is_due - time.monotonic())):
            is_due = time.monotonic() + pause
            pause = min(LONGEST, pause * GROWTH)
            sign: dict[str, Any] = {"step": reader.step, "what": what, "source": without_user(reader.name)}
            sign |= {"wanted": progress.wanted - before[0], "done": progress.done - before[1]}
            if not sign["wanted"]:
                continue
            sign["num_bytes"] = sum(manifest.num_bytes for manifest in reader.manifests)
            if not self._is_named:
                self._is_named = True
                size = format_count(sign["num_bytes"])
                _say(f"reading {sign['source']} (step {sign['step']}, {size}B in all)")
            _say(in_words(sign))
            if self._signs is not None:
                self._signs.put(**sign)
        if self._signs is not None:
            self._signs.clear()


def _say(line: str) -> None:
    print_line(f"elastictrain: {line}", console=make_console())


@contextlib.contextmanager
def silently(_what: str, _reader: CheckpointReader) -> Iterator[None]:
    """The same on other ranks."""
    yield
