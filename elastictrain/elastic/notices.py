"""Signals of an agent: a notice that its node is to go, and a second Ctrl-C, which does not wait."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from elastictrain.elastic.cells import StopReason
from elastictrain.elastic.membership import EXIT_INTERRUPTED
from elastictrain.errors import EXIT_PREEMPTED

SAME_KEYPRESS = 0.25  # seconds: a wrapper may pass on the Ctrl-C that the terminal has already sent


class Interrupted(BaseException):
    """A signal while no worker runs. Not an Exception: torch's rendezvous would retry."""


class Notices:
    """Of one agent.

    Args:
        is_waiting: no worker runs, and a signal may end the agent at once.
    """

    def __init__(self, is_waiting: Callable[[], bool]) -> None:
        self._is_waiting = is_waiting
        self._signals: list[tuple[int, float]] = []

    def install(self) -> dict[int, Any]:
        """Hear signals from now on, in the main thread; what was there before, by signal."""
        if threading.current_thread() is not threading.main_thread():
            return {}
        before: dict[int, Any] = {}
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # nohup
            before[number] = signal.signal(number, self._hear) or signal.SIG_DFL
        return before

    def check(self) -> None:
        """While nodes meet: a signal that has come just before ends it, too.

        Raises:
            Interrupted: there was one.
        """
        if self._signals:
            raise Interrupted

    @property
    def reason(self) -> StopReason | None:
        """Of the first signal; None: there was none."""
        if not self._signals:
            return None
        return StopReason.INTERRUPT if self._signals[0][0] == signal.SIGINT else StopReason.PREEMPT

    @property
    def exit_code(self) -> int:
        """Of an agent that nobody has to wait for."""
        return EXIT_INTERRUPTED if self.reason is StopReason.INTERRUPT else EXIT_PREEMPTED

    @property
    def is_by_hand(self) -> bool:
        """Somebody sits there, and may press Ctrl-C again."""
        return bool(self._interrupts)

    @property
    def wants_end(self) -> bool:
        """Ctrl-C was pressed again."""
        pressed = self._interrupts
        return bool(pressed) and pressed[-1] - pressed[0] > SAME_KEYPRESS

    @property
    def _interrupts(self) -> list[float]:
        return [when for number, when in self._signals if number == signal.SIGINT]

    def _hear(self, number: int, _frame: FrameType | None) -> None:
        self._signals.append((number, time.monotonic()))
        if self._is_waiting():
            raise Interrupted
