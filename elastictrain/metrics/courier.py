"""From the training loop to the run directory in the background: a queue, a thread, and writers that may fail.

:meth:`Courier.put` appends an item and looks at the clock; everything else happens in one background thread. Each writer
gets all items, in order, at times that become rarer as a run grows older, and at once when there are many.

On failure: training goes on. When the store refuses, one warning is logged, the items stay in memory and are tried again at
the next flush; nothing is lost below ``max_items`` waiting ones, beyond that the oldest go first and the loss is said.
:meth:`Courier.close` waits a bounded time and says how many it could not write.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from elastictrain.rundir import RunDir, first_line

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)

FIRST_INTERVAL = 2.0  # seconds between flushes at first, so that a new run is soon seen
LAST_INTERVAL = 30.0  # and later, so that a long run does not leave a million objects
STORE_INTERVAL = 300.0  # the same on object stores, where each flush leaves objects that every reader has to list
_QUIET = 1.5  # times the interval, after which an idle process is heard
_SEGMENT = 5_000  # items in one object at most: what a long outage has kept back goes out in pieces

_log = logging.getLogger(__name__)


class Writer(Protocol[T_contra]):
    """Where items go. Used by one thread only."""

    what: str
    """What it writes, for messages."""

    def write(self, items: Sequence[T_contra]) -> None:
        """Write all of ``items`` or raise and leave none of them behind; called again with the same ones then."""


def interval(age: float, *, last: float = LAST_INTERVAL) -> float:
    """Seconds between two flushes of what has been going on for ``age`` seconds; ``last`` at most."""
    return min(max(FIRST_INTERVAL, age / 10), last)


class _Outlet(Generic[T]):
    """One writer and what it has still to write."""

    def __init__(self, writer: Writer[T], *, run_dir: RunDir, max_items: int) -> None:
        self._writer = writer
        self._run_dir = run_dir
        self._max_items = max_items
        self._failing = False
        self.waiting: deque[T] = deque()
        self.num_dropped = 0

    def take(self, items: Sequence[T]) -> None:
        self.waiting.extend(items)
        while len(self.waiting) > self._max_items:
            self.waiting.popleft()
            self.num_dropped += 1

    def write(self) -> bool:
        """Write all that waits; False if the store refused."""
        while self.waiting:
            batch = list(itertools.islice(self.waiting, _SEGMENT))
            try:
                self._writer.write(batch)
            except Exception as error:
                if not self._failing:
                    _log.warning(
                        "%s cannot be written to %s (%s); kept in memory and tried again",
                        *(self._writer.what, self._run_dir, first_line(error)),
                    )
                self._failing = True
                return False
            for _ in batch:
                self.waiting.popleft()
        if self._failing:
            _log.info("%s can be written to %s again", self._writer.what, self._run_dir)
            self._failing = False
        return True


class Courier(Generic[T]):
    """Takes items from one thread of one process.

    Args:
        writers: each gets every item.
        what: the items are records of, for messages.
        max_items: how many wait in memory, for each writer, while the store does not take them.
        pace: seconds between two flushes, from the age of the courier in seconds.
        idle: makes an item where nobody has asked for a flush for half as long again, from the first one on; in the
            background. So it is heard that this process lives.
    """

    def __init__(
        self,
        run_dir: RunDir,
        writers: Sequence[Writer[T]],
        *,
        what: str,
        max_items: int,
        pace: Callable[[float], float] = interval,
        idle: Callable[[], T] | None = None,
    ) -> None:
        self._outlets = [_Outlet(writer, run_dir=run_dir, max_items=max_items) for writer in writers]
        self.what = what
        self._run_dir = run_dir
        self._max_items = max_items
        self._pace, self._idle = pace, idle
        self._inbox: deque[T] = deque()
        self._under_way: deque[T] = deque(maxlen=max_items)  # taken from there, and perhaps not written yet
        self._num_dropped = 0
        self._born = time.monotonic()
        self._due = self._born + pace(0.0)
        self._changed = threading.Condition()
        self._asked = self._served = self._written = 0  # numbers of flushes
        self._deadline: float | None = None  # set once closing: when to give up
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()
        atexit.register(self.close)

    def put(self, item: T) -> None:
        """Have it written, in its turn and before long."""
        self._inbox.append(item)
        if time.monotonic() >= self._due or not len(self._inbox) % _SEGMENT:
            self._ask()

    def _prepared(self, item: T) -> T:
        """The item as writers get it; in the background thread."""
        return item

    def _are_written(self, items: Sequence[T]) -> None:
        """All of them are, by every writer; called with the lock held."""

    def _more(self, *, closing: bool) -> Sequence[T]:
        """What there is to write beside what was given; in the background, after a flush, while nobody asks for another."""
        return []

    def waiting(self, most: int) -> list[T]:
        """The newest of what is not written yet, for all that is known here; takes no longer where there is more."""
        with self._changed:
            newest = itertools.chain(reversed(self._inbox), reversed(self._under_way))
            return [*itertools.islice(newest, most)][::-1]

    def flush(self, *, wait: float = 0.0) -> bool:
        """Have everything given so far written now, in the background.

        Args:
            wait: seconds to wait for it.

        Returns:
            Whether it is all written by now.
        """
        if os.getpid() != self._pid:
            return False
        number = self._ask()
        with self._changed:
            if wait > 0:
                self._changed.wait_for(lambda: self._served >= number, timeout=wait)
            return self._written >= number

    def close(self, *, timeout: float = 10.0) -> None:
        """Write what is left, trying again until ``timeout`` seconds have passed, and stop. Idempotent."""
        if self._deadline is not None or os.getpid() != self._pid:
            return
        atexit.unregister(self.close)
        self._due = math.inf
        with self._changed:  # together: the thread ends once there is a deadline and nothing more is asked for
            self._deadline = time.monotonic() + timeout
            if self._thread is None and not self._inbox:
                return
            number = self._ask()
        assert self._thread is not None
        self._thread.join(timeout)
        if self._written < number:
            left = max(len(outlet.waiting) for outlet in self._outlets) + len(self._inbox)
            _log.warning(
                "%d records of %s were not written to %s: the store refused or was slow",
                *(left, self.what, self._run_dir),
            )

    def _ask(self) -> int:
        now = time.monotonic()
        if self._deadline is None:
            self._due = now + self._pace(now - self._born)
        with self._changed:
            while len(self._inbox) > self._max_items:  # the thread hangs in the store
                self._inbox.popleft()
                self._num_dropped += 1
            self._asked += 1
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"elastictrain-{self.what}", daemon=True)
                self._thread.start()
            return self._asked

    # ---- the background thread -------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._changed.wait_for(lambda: self._asked > self._served, timeout=self._patience()):
                    assert self._idle is not None
                    self._inbox.append(self._idle())
                    self._asked += 1
                number = self._asked
                items = [self._inbox.popleft() for _ in range(len(self._inbox))]
                self._under_way.extend(items)
            self._hand_out([self._prepared(item) for item in items])
            done = self._write_by_the_deadline()
            with self._changed:
                self._served = number
                if done:
                    self._written = number
                    self._are_written(list(self._under_way))
                    self._under_way.clear()
                self._changed.notify_all()
                closing, is_asked = self._deadline is not None, self._asked > number
            # What takes its time comes after what somebody may wait for, and what goes with the next flush needs no object.
            if done and not is_asked and (more := self._more(closing=closing)):
                self._hand_out(more)
                if closing:
                    self._write_by_the_deadline()
            with self._changed:
                if self._deadline is not None and self._asked == number:
                    return

    def _patience(self) -> float | None:
        """Seconds to wait for somebody to ask; None: forever."""
        if self._idle is None or self._deadline is not None:
            return None
        return _QUIET * self._pace(time.monotonic() - self._born)

    def _write_by_the_deadline(self) -> bool:
        """Write; once closing, again and again until it is done or late."""
        done = self._write()
        while not done and self._deadline is not None and time.monotonic() < self._deadline:
            time.sleep(0.2)
            done = self._write()
        return done

    def _hand_out(self, items: Sequence[T]) -> None:
        for outlet in self._outlets:
            outlet.take(items)

    def _write(self) -> bool:
        done = all([outlet.write() for outlet in self._outlets])  # noqa: C419 - a list: each one gets its turn
        with self._changed:
            dropped, self._num_dropped = self._num_dropped, 0
        for outlet in self._outlets:
            dropped, outlet.num_dropped = max(dropped, outlet.num_dropped), 0
        if dropped:
            _log.warning(
                "the oldest %d records of %s were dropped: %s is down or slow", dropped, self.what, self._run_dir
            )
        return done
