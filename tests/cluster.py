"""Agents of ``elastictrain run`` as processes of this machine that share a run directory, and what may happen to them.

For :mod:`tests.matrix` and :mod:`tests.soak`. The task is one of :mod:`tests.cli.lives_task`, which writes down what each
rank trains on; that is all a cluster knows of how far the run is.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from elastictrain.channel import key_of
from elastictrain.checkpoint.token import read_token
from elastictrain.cli import launch as launch_module  # noqa: F401 - torch, before anything is forked
from elastictrain.cli import main as main_module
from elastictrain.elastic.runlog import RunLog
from elastictrain.rundir import RunDir
from tests.cli.lives_task import NUM_SAMPLES, workers_of
from tests.helpers import begin_fork
from tests.processes import children_of, listens

ROOT = Path(__file__).parents[1]
LIVES = f"{ROOT / 'tests' / 'cli' / 'lives_task.py'}:Lives"
LIMIT = 240.0  # seconds that a run may take to go on after an event
LIFE = 4 * 3600.0  # seconds after which a process that was forgotten ends
BATCH = 8
ENVIRONMENT = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
STEPS = 1_000_000  # more than any run comes to


class Agent:
    """A child process, in a session of its own."""

    def __init__(self, out: Path, pid: int) -> None:
        self.out, self.pid = out, pid
        self._code: int | None = None

    def poll(self) -> int | None:
        """The exit code; None while it runs."""
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def wait(self, seconds: float = LIMIT) -> int:
        deadline = time.monotonic() + seconds
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise AssertionError(f"agent {self.pid} does not end\n{self.text[-3000:]}")
            time.sleep(0.02)
        return code

    def send(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    @property
    def text(self) -> str:
        return self.out.read_text()


def forked(out: Path, argv: Sequence[str], *, before: Callable[[], None] = lambda: None) -> Agent:
    """The command in a process that has torch already; ``before`` is called there first."""
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            os.environ.update(ENVIRONMENT)
            file = os.open(out, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
            os.dup2(file, 1)
            os.dup2(file, 2)
            sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
            begin_fork(LIFE)
            before()
            main_module.main(list(argv))
        except SystemExit as end:
            sys.stdout.flush()
            os._exit(end.code if isinstance(end.code, int) else 99)
        finally:
            os._exit(98)
    return Agent(out, pid)


def executed(out: Path, argv: Sequence[str], env: Mapping[str, str], *, module: str = "elastictrain") -> Agent:
    """The command in a new program, whose environment others can read in ``/proc``; ``env``: what is added to it."""
    files = [(os.POSIX_SPAWN_OPEN, 1, out, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), (os.POSIX_SPAWN_DUP2, 1, 2)]
    command = [sys.executable, "-m", module, *argv]
    pid = os.posix_spawn(sys.executable, command, {**os.environ, **ENVIRONMENT, **env}, file_actions=files, setsid=True)
    return Agent(out, pid)


@dataclass
class Cluster:
    """One run, and what has happened to it.

    Args:
        num_nodes: at most.
        min_nodes: fewer of them do not train.
        workers: on each node.
        target: a task of :mod:`tests.cli.lives_task`, or one like it.
        options: of the command, beside those of every cluster.
        before: called in each agent's process first.
    """

    folder: Path
    num_nodes: int
    workers: int = 1
    target: str = LIVES
    options: Sequence[str] = ("--spares", "1")
    min_nodes: int = 1
    before: Callable[[], None] = lambda: None
    agents: list[Agent] = field(default_factory=list)
    frozen: list[tuple[float, int]] = field(default_factory=list)
    leaving: set[int] = field(default_factory=set)
    num_started: int = 0

    # ---- what may happen ---------------------------------------------------------------------------------------------

    def join(self, *, workers: int | None = None) -> Agent:
        """One node more."""
        options = ["--nnodes", f"{self.min_nodes}:{self.num_nodes}", "--nproc-per-node", str(workers or self.workers)]
        options += ["--local-addr", "127.0.0.1", "--snapshot-every", "1", "--max-restarts", "1000"]
        argv = self.command(self.folder, STEPS, *options, *self.options)
        agent = self.start(self.folder / f"agent-{self.num_started}", argv)
        self.num_started += 1
        self.agents.append(agent)
        return agent

    def start(self, out: Path, argv: Sequence[str]) -> Agent:
        return forked(out, argv, before=self.before)

    def command(self, folder: Path, num_steps: int, *more: str) -> list[str]:
        options = ["--run-dir", str(folder / "run"), "--max-steps", str(num_steps), "--log-every", "1"]
        options += ["--micro-batch-size", "1", "--set", f"folder={folder}"]
        return ["run", self.target, *options, *more]

    def lose(self, agent: Agent) -> None:
        """The whole node: its agent, its workers, its keeper."""
        children = children_of(agent.pid)
        agent.send(signal.SIGKILL)
        for pid in children:
            kill(pid, signal.SIGKILL)
        agent.wait()
        self.agents.remove(agent)

    def leave(self, agent: Agent) -> None:
        self.leaving.add(agent.pid)
        agent.send(signal.SIGTERM)

    def leader(self) -> Agent | None:
        """The agent that listens where the run log says."""
        run_dir = RunDir(str(self.folder / "run"))
        leader = RunLog(run_dir, key_of(read_token(run_dir))).newest().leader
        return next((one for one in self.agents if leader is not None and listens(one.pid, leader.port)), None)

    def keeper_of(self, agent: Agent) -> int:
        return children_of(agent.pid, running="keeper_main")[0]

    def freeze(self, pid: int, seconds: float) -> None:
        os.kill(pid, signal.SIGSTOP)
        self.frozen.append((time.monotonic() + seconds, pid))

    def thaw(self, *, all_of_them: bool = False) -> None:
        for due, pid in list(self.frozen):
            if all_of_them or time.monotonic() > due:
                self.frozen.remove((due, pid))
                kill(pid, signal.SIGCONT)

    def stop(self) -> None:
        self.thaw(all_of_them=True)
        for agent in self.agents:
            agent.send(signal.SIGTERM)
        for agent in self.agents:
            try:
                agent.wait()
            except AssertionError:
                self.lose(agent)
                raise

    # ---- how far it is -----------------------------------------------------------------------------------------------

    def newest_step(self) -> int:
        return max((self._last_of(file)[1] for file in self.folder.glob("samples-*")), default=-1)

    def num_ranks(self) -> int:
        """Of the newest generation that has trained."""
        found = [self._last_of(file)[0] for file in self.folder.glob("samples-*")]
        return found.count(max(found, default=-1))

    @staticmethod
    def _last_of(file: Path) -> tuple[int, int]:
        words = last_line(file).split()
        return (int(words[0]), int(words[1])) if words else (-1, -1)

    def wait_for(self, step: int) -> None:
        deadline = time.monotonic() + LIMIT
        while self.newest_step() < step:
            self.look()
            if time.monotonic() > deadline:
                raise AssertionError(f"step {step} is not reached\n{self.said}")
            time.sleep(0.05)

    def look(self) -> None:
        """Those that were stopped for long enough go on; those that have ended are gone."""
        self.thaw()
        self.agents = [one for one in self.agents if one.poll() is None]

    def settle(self, num_ranks: int | None = None) -> None:
        """Until so many ranks, or those of all nodes that are there, and only those, train together."""
        deadline = time.monotonic() + LIMIT
        while self.num_ranks() != (self.num_wanted if num_ranks is None else num_ranks) or self.frozen:
            self.wait_for(self.newest_step() + 1)
            if time.monotonic() > deadline:
                raise AssertionError(f"{len(self.agents)} nodes do not find together\n{self.said}")

    @property
    def num_wanted(self) -> int:
        return len(self.agents) * self.workers

    def workers_of(self, agent: Agent) -> list[int]:
        return workers_of(agent.pid)

    @property
    def said(self) -> str:
        return "\n".join(f"--- {file.name}\n{file.read_text()[-2500:]}" for file in sorted(self.folder.glob("agent-*")))

    # ---- what it came to -----------------------------------------------------------------------------------------------

    def losses(self, folder: Path | None = None) -> dict[int, list[float]]:
        """By step, all that were logged there, the oldest start's first."""
        found: dict[int, list[float]] = {}
        for file in sorted(((folder or self.folder) / "run" / "metrics").glob("*.jsonl")):
            for row in map(json.loads, file.read_text().splitlines()):
                if "train/loss" in row:
                    found.setdefault(row["step"], []).append(row["train/loss"])
        return found

    def newest_losses(self, folder: Path | None = None) -> dict[int, float]:
        """The last one of each step."""
        return {step: found[-1] for step, found in self.losses(folder).items()}

    def check_samples(self, num_steps: int) -> None:
        """What counts of a step is what the last generation that came there has done; every sample is used as often."""
        last: dict[int, int] = {}
        shares: dict[tuple[int, int], dict[int, list[int]]] = {}
        for file in self.folder.glob("samples-*"):
            rank = int(file.name.split("-")[1])
            for line in file.read_text().splitlines():
                generation, step, *numbers = map(int, line.split())
                last[step] = max(last.get(step, -1), generation)
                shares.setdefault((generation, step), {}).setdefault(rank, []).extend(numbers)
        used: Counter[int] = Counter()
        for step in range(num_steps):
            by_rank = shares[last[step], step]
            distinct = {tuple(sorted(share)) for share in by_rank.values()}  # ranks of tp and pp have the same
            taken = [sample for share in distinct for sample in share]
            assert len(taken) == BATCH, f"step {step} in generation {last[step]}: {by_rank}"
            used.update(taken)
        assert sum(used.values()) == num_steps * BATCH
        assert max(used.values()) - min(used[sample] for sample in range(NUM_SAMPLES)) <= 1, used


def kill(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def last_line(file: Path) -> str:
    with open(file, "rb") as lines:
        lines.seek(max(0, file.stat().st_size - 400))
        whole = lines.read().decode().split("\n")[:-1]
    return whole[-1] if whole else ""
