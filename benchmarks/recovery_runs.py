"""Runs that ``recovery.py`` disturbs: when each rank has done its steps, who is to be killed, and when it has gone on.

A run *rests* while a file of that name is in its folder: each step then takes a tenth of a second longer, so that processes
that start beside it on few cores are soon done. It rests only between two measurements.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from elastictrain.channel import key_of
from elastictrain.checkpoint.token import read_token
from elastictrain.elastic.line import WARM
from elastictrain.elastic.runlog import RunLog
from elastictrain.rundir import RunDir

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
LIMIT = 180.0
LOOK = 0.02  # seconds between two looks at the steps; what is measured is what the ranks have written

from benchmarks.recovery_task import REST  # noqa: E402
from tests.processes import children_of, listens  # noqa: E402


class Steps:
    """What the ranks of a run have written, read as it grows.

    Attributes:
        first: when a rank had done its first step in a generation: seconds since the epoch, by generation and rank.
        last: when any rank had done its last one, by generation.
        pids: by generation and rank.
        next: when a rank had done its first step since :meth:`mark`, by rank.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, int] = {}  # bytes of each file
        self.first: dict[tuple[int, int], float] = {}
        self.last: dict[int, float] = {}
        self.pids: dict[tuple[int, int], int] = {}
        self.next: dict[int, float] = {}
        self._mark = math.inf

    def mark(self) -> float:
        """Now, seconds since the epoch."""
        self._mark, self.next = time.time(), {}
        return self._mark

    @property
    def generation(self) -> int:
        """The newest; -1: none yet."""
        return max(self.last, default=-1)

    def look(self) -> None:
        for path in self._folder.glob("steps-*"):
            with open(path, "rb") as file:
                file.seek(self._read.get(path, 0))
                whole = file.read().rpartition(b"\n")[0]
            self._read[path] = self._read.get(path, 0) + len(whole) + bool(whole)
            for line in whole.splitlines():
                moment, pid, rank, generation = (
                    convert(text) for convert, text in zip(_LINE, line.split(), strict=False)
                )
                self.first.setdefault((generation, rank), moment)
                self.pids[generation, rank] = pid
                if moment > self._mark:
                    self.next.setdefault(rank, moment)
                self.last[generation] = max(self.last.get(generation, 0.0), moment)

    def ranks(self, generation: int) -> int:
        """How many have done a step in it."""
        return sum(one == generation for one, _ in self.first)


_LINE: Sequence[Callable[[bytes], int | float]] = (float, int, int, int)


class Run:
    """One run, in a folder of its own.

    Args:
        command: starts it.
        env: its environment beside this process' own.
    """

    def __init__(self, command: Sequence[str], folder: Path, num_ranks: int, **env: str) -> None:
        self.folder, self.num_ranks, self.steps = folder, num_ranks, Steps(folder)
        self.process = self.launch(command, **env)

    def launch(self, command: Sequence[str], **env: str) -> subprocess.Popen[bytes]:
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **env}
        with open(self.folder / "output", "a") as out:
            return subprocess.Popen(command, stdout=out, stderr=out, env=env, start_new_session=True)

    def wait(self, is_so: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + LIMIT
        while True:
            self.steps.look()
            if is_so():
                return
            if time.monotonic() > deadline or self.process.poll() is not None:
                raise RuntimeError(f"{what}: {(self.folder / 'output').read_text()[-3000:]}")
            time.sleep(LOOK)

    def wait_for_all(self, *, after: int) -> int:
        """Until all ranks have done a step in a generation later than that; which one it is."""
        steps = self.steps
        self.wait(
            lambda: steps.generation > after and steps.ranks(steps.generation) == self.num_ranks, "it does not train"
        )
        return steps.generation

    def began(self, generation: int) -> float:
        """When the last of its ranks had done its first step."""
        return max(moment for (one, _), moment in self.steps.first.items() if one == generation)

    @contextlib.contextmanager
    def resting(self) -> Iterator[None]:
        (self.folder / REST).touch()
        try:
            yield
        finally:
            (self.folder / REST).unlink()

    def kill_one(self, rank: int) -> float:
        """Seconds until all ranks have done a new step."""
        self.steps.look()
        generation = self.steps.generation
        os.kill(self.steps.pids[generation, rank], signal.SIGKILL)
        killed = time.time()
        return self.began(self.wait_for_all(after=generation)) - killed

    def wait_for_spare(self) -> None:
        """Until a process that has no place in the run has imported everything."""
        with self.resting():

            def is_there() -> bool:
                busy = set(self.steps.pids.values())
                spares = [pid for pid in workers_of(self.process.pid) if pid not in busy]
                return bool(spares) and all(map(is_warm, spares))

            self.wait(is_there, "no spare becomes warm")

    def stop(self) -> None:
        self.process.send_signal(signal.SIGINT)
        self.end()

    def end(self) -> None:
        """Whatever it still does, nothing of it is left."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(LIMIT)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Nodes(Run):
    """Several agents of one run directory; the first is the process of the run.

    Args:
        command: starts one of them.
    """

    def __init__(self, command: Sequence[str], folder: Path, num_nodes: int) -> None:
        self._command = command
        self._left: list[subprocess.Popen[bytes]] = []
        super().__init__(command, folder, num_nodes)
        self.agents = [self.process, *(self.launch(command) for _ in range(num_nodes - 1))]

    def change(self, act: Callable[[], None], *, ranks: int, is_death: bool = False) -> float:
        """Seconds that it costs: from the death, or from the last step before, to the first step after, of all ranks.

        Args:
            ranks: how many train afterwards.
        """
        self.steps.look()
        before, self.num_ranks = self.steps.generation, ranks
        began = time.time()
        act()
        generation = self.wait_for_all(after=before)
        last = max(moment for number, moment in self.steps.last.items() if number < generation)
        return self.began(generation) - (began if is_death else last)

    def join(self) -> None:
        """One more, which the others see when it is warm; they rest until then."""
        with self.resting():
            agent = self.launch(self._command)
            self.agents.append(agent)

            def is_ready() -> bool:
                workers = workers_of(agent.pid)
                return bool(workers) and all(map(is_warm, workers))

            self.wait(is_ready, "the new node does not become warm")

    def lose(self, agent: subprocess.Popen[bytes]) -> None:
        ours = children_of(agent.pid)
        agent.kill()
        for pid in ours:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._forget(agent)
        agent.wait()

    def leave(self, agent: subprocess.Popen[bytes]) -> None:
        agent.send_signal(signal.SIGTERM)
        self._forget(agent)
        self._left.append(agent)

    def _forget(self, agent: subprocess.Popen[bytes]) -> None:
        self.agents.remove(agent)
        self.process = self.agents[0]

    def leader(self) -> subprocess.Popen[bytes]:
        run_dir = RunDir(str(self.folder / "run"))
        leader = RunLog(run_dir, key_of(read_token(run_dir))).newest().leader
        assert leader is not None
        return next(one for one in self.agents if listens(one.pid, leader.port))

    def member(self, number: int) -> subprocess.Popen[bytes]:
        """One that does not lead; another one for another number."""
        leader = self.leader()
        others = [one for one in self.agents if one is not leader]
        return others[number % len(others)]

    def stop(self) -> None:
        for agent in self.agents:
            agent.send_signal(signal.SIGTERM)
        for agent in [*self.agents, *self._left]:
            self.process = agent
            self.end()


def workers_of(agent: int) -> list[int]:
    return children_of(agent, running="elastictrain.cli.worker")


def is_warm(pid: int) -> bool:
    """Has it imported everything, and waits for a place, or has one?"""
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    name = f"{WARM}=".encode()
    return any(os.path.exists(one.removeprefix(name)) for one in environment if one.startswith(name))
