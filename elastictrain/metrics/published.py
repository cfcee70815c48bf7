"""The newest values of a node's workers, on their way to whoever asks its agent.

On log steps a worker hands on what was logged; a thread writes the last value of every name to a small file beside the
assignment, each time a whole new one. The agent reads these files when it is asked, and when a generation
ends, so that it has something to tell while workers start again.

On failure: a file that cannot be written or read is passed over; the values before it stay.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from elastictrain.machine import write_whole

# What is of one rank; everything else that is logged is of the run, and rank 0 tells it.
OF_A_RANK = ("time/", "memory/", "throughput/loader_queue")

_CLOSING = 2.0  # seconds to write the last values


def file_of(folder: str, local_rank: int) -> str:
    return os.path.join(folder, f"metrics-{local_rank}.json")


class Publisher:
    """Of one worker.

    Args:
        path: see :func:`file_of`.
    """

    def __init__(self, path: str, *, rank: int) -> None:
        self._path, self._rank = path, rank
        self._waiting: deque[tuple[float, int, Mapping[str, Any], Mapping[str, Any]]] = deque()
        self._there = threading.Event()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="elastictrain-published", daemon=True)
        self._thread.start()

    def put(self, step: int, *, run: Mapping[str, Any], own: Mapping[str, Any]) -> None:
        """Values by name: those of the run, on rank 0, and those that callbacks have of this rank. They are kept."""
        self._waiting.append((time.time(), step, run, own))
        self._there.set()

    def close(self) -> None:
        """Write what is left. Idempotent."""
        self._is_closed = True
        self._there.set()
        self._thread.join(_CLOSING)

    def _run(self) -> None:
        values: dict[str, dict[str, float]] = {"run": {}, "own": {}}
        about: dict[str, Any] = {"rank": self._rank}
        while not self._is_closed or self._waiting:
            self._there.wait()
            self._there.clear()
            has_news = bool(self._waiting)
            while self._waiting:
                about["time"], about["step"], run, own = self._waiting.popleft()
                values["run"] |= _numbers(run, of_a_rank=False)
                values["own"] |= _numbers(own, of_a_rank=True)
            if has_news:
                with contextlib.suppress(OSError):  # the generation is over, or the disk is full
                    write_whole(self._path, {**about, **values})


def _numbers(values: Mapping[str, Any], *, of_a_rank: bool) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in values.items()
        if name.startswith(OF_A_RANK) == of_a_rank and isinstance(value, int | float)
    }


class Published:
    """Of one agent: used by its loop, and by the thread that answers.

    Attributes:
        generation: the number of workers' starts before the newest one; -1 before the first.
        workers: that run now.
        restarts: of this agent's workers.
    """

    def __init__(self) -> None:
        self.generation, self.workers, self.restarts = -1, 0, 0
        self._folder: str | None = None
        self._newest: list[dict[str, Any]] = []
        self._lock = threading.Lock()

    def begin(self, folder: str, *, generation: int, workers: int) -> None:
        """Workers start; they will write into ``folder``."""
        with self._lock:
            self.restarts += self.generation >= 0
            self._folder, self.generation, self.workers = folder, generation, workers

    def end(self) -> None:
        """They have ended, and the folder goes."""
        with self._lock:
            self._look()
            self._folder, self.workers = None, 0

    def values(self) -> list[dict[str, Any]]:
        """The newest publication of each worker; of the generation before until this one has any."""
        with self._lock:
            self._look()
            return self._newest

    def _look(self) -> None:
        found: list[dict[str, Any]] = []
        for local_rank in range(self.workers if self._folder is not None else 0):
            with contextlib.suppress(OSError, ValueError), open(file_of(self._folder or "", local_rank)) as file:
                found.append(json.load(file))
        if found:
            self._newest = found
