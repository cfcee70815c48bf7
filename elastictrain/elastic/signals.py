"""Signals of a worker process, and its end with its agent."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

Handler = Callable[[int, FrameType | None], Any] | int | None


class Handlers:
    """Signal handlers of this process, put back on request. Nothing outside the main thread, where there are none."""

    def __init__(self) -> None:
        self._before: dict[int, Handler] = {}

    def install(self, ask: Callable[[int], None]) -> None:
        """Call ``ask`` with the number of each SIGINT and SIGTERM of this process; not of those it forks."""
        pid = os.getpid()

        def handler(number: int, _frame: FrameType | None) -> None:
            if os.getpid() == pid:
                ask(number)
            elif number == signal.SIGTERM:  # a loader process: its parent ends it like this
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            # Ctrl-C reaches loader processes too; they go on, since the step in progress still needs their data

        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, handler)

    def restore(self) -> None:
        if threading.current_thread() is threading.main_thread():
            while self._before:
                number, handler = self._before.popitem()
                signal.signal(number, signal.SIG_DFL if handler is None else handler)


def die_with(parent: int) -> None:
    """End this process when ``parent``, its parent, ends: workers that nobody watches would train on, and hold GPUs."""
    if sys.platform == "linux":
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG of linux/prctl.h
        ctypes.CDLL(None, use_errno=True).prctl(set_parent_death_signal, signal.SIGKILL)
    else:
        threading.Thread(target=_watch_parent, args=(parent,), daemon=True).start()
    if os.getppid() != parent:  # it ended before the kernel was told
        os._exit(1)


def _watch_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)
