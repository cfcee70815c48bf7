"""Random events in one long run: nodes are killed, stopped, told to leave, and join; some of it at the same time.

    python -m tests.soak [--events 200] [--seed 0] [--nodes 3] [--folder DIR]

Agents are real processes of ``elastictrain run`` on one run directory, on this machine. In the end every sample has been
used exactly as often as it should, and the losses are those of a run that nobody has disturbed. A seed chooses
among the events that are possible at that moment, which depends on the machine: the list that is printed tells what has
happened, and the same seed need not make the same list.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from elastictrain.channel import key_of
from elastictrain.checkpoint.token import read_token
from elastictrain.elastic.runlog import RunLog
from elastictrain.rundir import RunDir
from tests.cli.lives_task import NUM_SAMPLES, workers_of
from tests.processes import children_of, listens

ROOT = Path(__file__).parents[1]
TASK = f"{ROOT / 'tests' / 'cli' / 'lives_task.py'}:Lives"
LIMIT = 240.0  # seconds that a run may take to go on after an event
CALM = 4  # steps between two events
FREEZE = (0.3, 5.0)  # seconds
BATCH = 8


@dataclass
class Soak:
    """One run, and what has happened to it."""

    folder: Path
    num_nodes: int
    chance: random.Random
    agents: list[subprocess.Popen[bytes]] = field(default_factory=list)
    frozen: list[tuple[float, int]] = field(default_factory=list)
    leaving: set[int] = field(default_factory=set)
    num_started: int = 0
    happened: Counter[str] = field(default_factory=Counter)

    def join(self) -> None:
        options = [
            "--nnodes",
            f"1:{self.num_nodes}",
            "--nproc-per-node",
            "1",
            "--local-addr",
            "127.0.0.1",
            "--spares",
            "1",
        ]
        options += ["--run-dir", str(self.folder / "run"), "--max-steps", "1000000", "--snapshot-every", "1"]
        options += ["--log-every", "1", "--micro-batch-size", "1", "--max-restarts", "1000"]
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "elastictrain", "run", TASK, *options, "--set", f"folder={self.folder}"]
        with open(self.folder / f"agent-{self.num_started}", "w") as out:
            self.agents.append(subprocess.Popen(command, stdout=out, stderr=out, env=env, start_new_session=True))
        self.num_started += 1

    def lose(self, agent: subprocess.Popen[bytes]) -> None:
        """The whole node: its agent, its workers, its keeper."""
        children = children_of(agent.pid)
        agent.kill()
        for pid in children:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        agent.wait()
        self.agents.remove(agent)

    def leave(self, agent: subprocess.Popen[bytes]) -> None:
        self.leaving.add(agent.pid)
        agent.send_signal(signal.SIGTERM)

    def leader(self) -> subprocess.Popen[bytes] | None:
        """The agent that listens where the run log says."""
        run_dir = RunDir(str(self.folder / "run"))
        leader = RunLog(run_dir, key_of(read_token(run_dir))).newest().leader
        return next((one for one in self.agents if leader is not None and listens(one.pid, leader.port)), None)

    def freeze(self, pid: int) -> None:
        os.kill(pid, signal.SIGSTOP)
        self.frozen.append((time.monotonic() + self.chance.uniform(*FREEZE), pid))

    def thaw(self, *, all_of_them: bool = False) -> None:
        for due, pid in list(self.frozen):
            if all_of_them or time.monotonic() > due:
                self.frozen.remove((due, pid))
                try:
                    os.kill(pid, signal.SIGCONT)
                except ProcessLookupError:
                    pass

    def event(self) -> None:
        """One of them that is possible now."""
        away = self.leaving | {pid for _, pid in self.frozen}
        free = [one for one in self.agents if one.pid not in away]  # one of them is left alone
        ways: dict[str, Callable[[], None]] = {}
        if len(self.agents) < self.num_nodes:
            ways["join"] = self.join
        if len(free) > 1:
            victim = self.chance.choice(free)
            ways["node killed"] = lambda: self.lose(victim)
            ways["node leaves"] = lambda: self.leave(victim)
            ways["agent stopped"] = lambda: self.freeze(victim.pid)
            if (leader := self.leader()) in free and leader is not None:
                ways["leader killed"] = lambda: self.lose(leader)
                ways["leader stopped"] = lambda: self.freeze(leader.pid)
        workers = [pid for one in free for pid in workers_of(one.pid)]
        if workers:
            worker = self.chance.choice(workers)
            ways["worker killed"] = lambda: os.kill(worker, signal.SIGKILL)
            ways["worker stopped"] = lambda: self.freeze(worker)
        name = self.chance.choice(sorted(ways))
        ways[name]()
        self.happened[name] += 1
        print(f"{sum(self.happened.values())}: {name}, {len(self.agents)} nodes, step {self.newest_step()}", flush=True)

    def newest_step(self) -> int:
        lines = [last_line(file) for file in self.folder.glob("samples-*")]
        return max((int(line.split()[1]) for line in lines if line), default=-1)

    def wait_for(self, step: int) -> None:
        deadline = time.monotonic() + LIMIT
        while self.newest_step() < step:
            self.thaw()
            self.agents = [one for one in self.agents if one.poll() is None]
            if not self.agents:
                self.join()
            if time.monotonic() > deadline:
                raise AssertionError(f"step {step} is not reached; {dict(self.happened)}\n{self.said}")
            time.sleep(0.05)

    def settle(self) -> None:
        """Until those that are there, and only those, train together."""
        deadline = time.monotonic() + LIMIT
        while self.num_members() != len(self.agents) or self.frozen:
            self.wait_for(self.newest_step() + 1)
            if time.monotonic() > deadline:
                raise AssertionError(f"{len(self.agents)} nodes do not find together\n{self.said}")

    def num_members(self) -> int:
        """Of the newest generation that has trained."""
        found = [tuple(map(int, last_line(file).split()[:2])) for file in self.folder.glob("samples-*")]
        newest = max(found, default=(0, 0))
        return sum(generation == newest[0] for generation, *_ in found)

    @property
    def said(self) -> str:
        return "\n".join(f"--- {file.name}\n{file.read_text()[-2500:]}" for file in sorted(self.folder.glob("agent-*")))

    def run(self, num_events: int) -> None:
        for _ in range(self.num_nodes):
            self.join()
        self.wait_for(CALM)
        self.settle()
        while sum(self.happened.values()) < num_events:
            self.event()
            if self.chance.random() < 0.3 and sum(self.happened.values()) < num_events:
                self.event()
            self.wait_for(self.newest_step() + CALM)
            if self.chance.random() < 0.7:
                self.settle()
        while self.frozen:
            self.thaw(all_of_them=True)
        self.wait_for(self.newest_step() + CALM)

    def stop(self) -> None:
        self.thaw(all_of_them=True)
        for agent in self.agents:
            agent.send_signal(signal.SIGTERM)
        for agent in self.agents:
            try:
                agent.wait(LIMIT)
            except subprocess.TimeoutExpired:
                agent.kill()

    # ---- what it came to -----------------------------------------------------------------------------------------------

    def check(self) -> int:
        """Samples and losses; the number of steps."""
        last: dict[int, int] = {}
        samples: dict[tuple[int, int], list[int]] = {}
        for file in self.folder.glob("samples-*"):
            for line in file.read_text().splitlines():
                generation, step, *numbers = map(int, line.split())
                last[step] = max(last.get(step, -1), generation)
                samples.setdefault((generation, step), []).extend(numbers)
        losses = self.losses(self.folder / "run")
        num_steps = max(losses)
        used: Counter[int] = Counter()
        for step in range(num_steps):
            share = samples[last[step], step]
            assert len(share) == BATCH, f"step {step}: {share}"
            used.update(share)
        assert sum(used.values()) == num_steps * BATCH
        assert max(used.values()) - min(used[sample] for sample in range(NUM_SAMPLES)) <= 1, used
        calm, wide = self.calm(num_steps, 1), self.calm(num_steps, self.num_nodes)
        assert sorted(losses) == sorted(calm) == list(range(1, num_steps + 1))
        apart = [abs(losses[step] - calm[step]) for step in sorted(losses)]
        between = max(abs(wide[step] - calm[step]) for step in calm)
        print(
            f"{num_steps} steps, {dict(self.happened)}; losses at most {max(apart):.1e} from those of a calm run on one"
            f" rank, and those of calm runs on one and on {self.num_nodes} ranks {between:.1e} from each other"
        )
        assert max(apart[:20]) < 1e-6 * max(losses.values()), apart[:20]
        assert max(apart) < 10 * max(between, 1e-6)
        return num_steps

    def calm(self, num_steps: int, num_ranks: int) -> dict[int, float]:
        """The losses of a run to which nothing happens."""
        folder = self.folder / f"calm-{num_ranks}"
        folder.mkdir()
        command = [
            sys.executable,
            "-m",
            "elastictrain",
            "run",
            TASK,
            "--run-dir",
            str(folder / "run"),
            "--log-every",
            "1",
        ]
        command += ["--max-steps", str(num_steps), "--micro-batch-size", "1", "--set", f"folder={folder}"]
        command += ["--nproc-per-node", str(num_ranks)]
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, env=env, capture_output=True)
        return self.losses(folder / "run")

    @staticmethod
    def losses(run_dir: Path) -> dict[int, float]:
        """By step, the last that was logged there."""
        found: dict[int, float] = {}
        for file in sorted((run_dir / "metrics").glob("*.jsonl")):
            for row in map(json.loads, file.read_text().splitlines()):
                if "train/loss" in row:
                    found[row["step"]] = row["train/loss"]
        return found


def last_line(file: Path) -> str:
    with open(file, "rb") as lines:
        lines.seek(max(0, file.stat().st_size - 400))
        whole = lines.read().decode().split("\n")[:-1]
    return whole[-1] if whole else ""


def soak(folder: Path, *, num_events: int, seed: int, num_nodes: int) -> Soak:
    one = Soak(folder, num_nodes, random.Random(seed))
    try:
        one.run(num_events)
    finally:
        one.stop()
    one.check()
    return one


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--events", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="soak-"))
    folder.mkdir(exist_ok=True)
    print(f"seed {options.seed}, in {folder}", flush=True)
    soak(folder, num_events=options.events, seed=options.seed, num_nodes=options.nodes)


if __name__ == "__main__":
    main()
