"""Worker processes as an agent holds them: each in a session of its own, none left behind.

A process is started without a place in the run, and is given one after another (:mod:`elastictrain.elastic.line`); one that
waits for its first is a spare.

A worker has its own session, so the terminal's Ctrl-C reaches only the agent, and its own process group, so that its
loader processes end with it. stdin is empty, stdout and stderr are the agent's. A worker that has ended is kept as a
zombie until its group is killed: no other process can get its number in between.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from elastictrain.elastic.line import WARM, Place, Speaker
from elastictrain.machine import usable_cores


class WorkerProcess:
    """One running worker.

    Args:
        folder: where it may say that it is warm; None: it need not.

    Attributes:
        pid: also the number of its session and group.
        rank: in the generation that it was given a place in last; -1 before the first.
        ended_at: when its end was noticed, seconds since the epoch.
        ending: a descriptor that can be read from its end on; None: there is none, or its end has been noticed.
        code: exit code, negative for a signal as in ``subprocess``; None while it runs.
    """

    def __init__(self, command: Sequence[str], *, env: Mapping[str, str], folder: str | None = None) -> None:
        self.rank = -1
        self._warm = None if folder is None else os.path.join(folder, f"warm-{uuid.uuid4().hex}")
        self._line = Speaker()
        try:
            self._process = subprocess.Popen(
                command,
                env={**env, **self._line.environment, **({} if self._warm is None else {WARM: self._warm})},
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=(self._line.descriptor,),
            )
        except OSError:
            self._line.close()
            raise
        finally:
            self._line.handed_on()
        self.pid = self._process.pid
        self.ending: int | None = None
        with contextlib.suppress(AttributeError, OSError):  # no Linux, or no descriptor is left
            self.ending = os.pidfd_open(self.pid)
        self.ended_at: float | None = None
        self.code: int | None = None

    @property
    def is_warm(self) -> bool:
        """It has said that it has imported everything, and waits for its first place."""
        return self._warm is not None and os.path.exists(self._warm)

    def place(self, place: Place, *, rank: int) -> None:
        """Its place in a generation that begins."""
        self.rank = rank
        self._line.place(place)

    def over(self, generation: int) -> None:
        """That generation is over, and another may follow."""
        self._line.over(generation)

    def poll(self) -> int | None:
        """The exit code, or None; what the worker left running in its group is killed first."""
        if self.code is None:
            try:
                ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:  # reaped behind our back
                ended = True  # type: ignore[assignment]
            if ended is not None:
                self._signal_group(signal.SIGKILL)
                self.ended_at = time.time()
                self.code = self._process.wait()
                self._line.close()
                if self.ending is not None:
                    os.close(self.ending)
                    self.ending = None
        return self.code

    def terminate(self) -> None:
        """SIGTERM to the worker alone: it ends its own loader processes."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL to the worker and all it started."""
        if self.code is None:
            self._signal_group(signal.SIGKILL)

    def _signal_group(self, number: signal.Signals) -> None:
        try:
            os.killpg(self.pid, number)
        except (ProcessLookupError, PermissionError):  # gone; macOS says "not permitted" for a group of zombies
            pass

    @property
    def end(self) -> str:
        """How it ended, in words: "was killed by SIGKILL", "exited with code 1"."""
        assert self.code is not None
        if self.code >= 0:
            return f"exited with code {self.code}"
        try:
            name = signal.Signals(-self.code).name
        except ValueError:
            name = f"signal {-self.code}"
        return f"was killed by {name}"


def worker_environment(*, local_world_size: int, run_id: str) -> dict[str, str]:
    """The environment of a worker: the agent's, plus what torchrun would say whatever its place is."""
    defaults = {
        "OMP_NUM_THREADS": str(max(1, usable_cores() // local_world_size)),
        "PYTHONUNBUFFERED": "1",  # what a killed worker has printed is seen
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # else every peer of a dead worker warns at length
        # Else NCCL's watchdog ends a worker that has lost another one; torch asks for this where groups are aborted by hand.
        # What hangs then is found by the agent, which looks at the workers' progress.
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    }
    return {
        **defaults,
        **os.environ,
        "LOCAL_WORLD_SIZE": str(local_world_size),
        "TORCHELASTIC_RUN_ID": run_id,  # how libraries see that a launcher started them
    }


def place_environment(group: Any, worker: Any, generation: int) -> dict[str, str]:
    """What torchrun would say of one worker's place, from torch's ``WorkerGroup`` and its ``Worker``."""
    return {
        "RANK": str(worker.global_rank),
        "WORLD_SIZE": str(worker.world_size),
        "LOCAL_RANK": str(worker.local_rank),
        "GROUP_RANK": str(group.group_rank),
        "GROUP_WORLD_SIZE": str(group.group_world_size),
        "MASTER_ADDR": group.master_addr,
        "MASTER_PORT": str(group.master_port),
        "TORCHELASTIC_RESTART_COUNT": str(generation),
    }


def wait_for_an_end(workers: Iterable[WorkerProcess], *, seconds: float) -> None:
    """So long; where the system tells of the end of a process (Linux), no longer than until one of them has ended."""
    ends = select.poll()
    for worker in workers:
        if worker.ending is not None:
            ends.register(worker.ending, select.POLLIN)
    ends.poll(1000 * seconds)


def stop_all(workers: Iterable[WorkerProcess], *, seconds: float, tick: float = 0.01) -> None:
    """SIGTERM to all that run, SIGKILL to those that still do after ``seconds``; returns when none is left."""
    running = [worker for worker in workers if worker.poll() is None]
    for worker in running if seconds > 0 else ():
        worker.terminate()
    deadline = time.monotonic() + seconds
    while running and time.monotonic() < deadline:
        time.sleep(tick)
        running = [worker for worker in running if worker.poll() is None]
    for worker in running:
        worker.kill()
    while running:  # SIGKILL cannot be refused, only delayed by a driver
        time.sleep(tick)
        running = [worker for worker in running if worker.poll() is None]
