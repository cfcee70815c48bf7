"""Ten random runs with faults, of which every node-second must have one cause: real agents, workers, signals and ledgers.

    python -m tests.accounts [--runs 10] [--seed 0]

Each run has one node with two workers, or two nodes with one, and sometimes a node more than it has places for. On its way
workers and nodes are killed, nodes leave, all are stopped by Ctrl-C, and what is gone is started again.

Measured is from outside: each agent from when the kernel started its process until its parent saw it end, imports and the
interpreter's own end included. The sum over causes of the goodput that the ledger tells must be that, within 1%.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from elastictrain.metrics.goodput import goodput, stretches
from elastictrain.metrics.ledger import read_ledger
from elastictrain.rundir import RunDir
from tests import cluster
from tests.cli.measured_task import notes
from tests.cli.test_run import workers_of
from tests.cli.test_snapshots import keeper_of
from tests.processes import began_at

TASK = f"{Path(__file__).parent / 'cli' / 'measured_task.py'}:Measured"
STEPS, CALM = 60, 8  # steps of a run; at least so many between two events
OPTIONS = (
    "--log-every 1 --checkpoint-every 5 --snapshot-every 5 --micro-batch-size 4 --local-addr 127.0.0.1 --max-restarts 9"
)
PATIENCE = 300.0
MOST = 1.0  # percent


class Agent:
    """One of them, as its parent sees it."""

    def __init__(self, folder: Path, *argv: str) -> None:
        self.out = folder / "out"
        self.pid = cluster.executed(self.out, ["run", *argv], {}).pid
        self.began, self.ended, self.code = began_at(self.pid), 0.0, 0
        self._waiter = threading.Thread(target=self._wait, daemon=True)
        self._waiter.start()

    def _wait(self) -> None:
        _, status = os.waitpid(self.pid, 0)
        self.ended, self.code = time.time(), os.waitstatus_to_exitcode(status)

    @property
    def has_ended(self) -> bool:
        return not self._waiter.is_alive()

    @property
    def text(self) -> str:
        return self.out.read_text()

    def wait(self) -> int:
        self._waiter.join(2 * PATIENCE)
        assert self.has_ended, self.text
        return self.code

    def press_ctrl_c(self) -> None:
        os.killpg(self.pid, signal.SIGINT)  # what a terminal does

    def kill(self) -> None:
        """The whole node."""
        for pid in filter(None, [self.pid, *workers_of(self.pid).values(), keeper_of(self.pid)]):
            os.kill(pid, signal.SIGKILL)


@dataclass
class Run:
    """One of them."""

    folder: Path
    source: random.Random
    agents: list[Agent] = field(default_factory=list)
    gone: list[Agent] = field(default_factory=list)
    happened: Counter[str] = field(default_factory=Counter)

    def run(self) -> None:
        self.num_nodes = self.source.choice([1, 2])
        self.num_more = self.source.choice([0, 0, 1]) if self.num_nodes > 1 else 0
        try:
            self.start()
            for _ in range(self.source.randint(2, 3)):
                self.wait_for(self.reached() + CALM + self.source.randrange(4))
                self.event()
                if self.reached() < STEPS:
                    self.start()
            self.end()
        finally:
            for agent in self.agents:
                if not agent.has_ended:
                    os.killpg(agent.pid, signal.SIGKILL)

    def start(self) -> None:
        """As many nodes as there should be."""
        while len(self.agents) < self.num_nodes + self.num_more:
            folder = self.folder / str(len(self.agents) + len(self.gone))
            folder.mkdir()
            options = [TASK, "--run-dir", str(self.folder / "run"), "--max-steps", str(STEPS), *OPTIONS.split()]
            options += ["--nnodes", f"1:{self.num_nodes}", "--nproc-per-node", str(3 - self.num_nodes), "--spares", "0"]
            self.agents.append(Agent(folder, *options, "--set", f"folder={self.folder}", "--set", "pace=0.1"))

    def reached(self) -> int:
        return sum(note["what"] == "step" and note["rank"] == 0 for note in notes(self.folder))

    def wait_for(self, count: int) -> None:
        deadline = time.monotonic() + PATIENCE
        while self.reached() < count and not all(agent.has_ended for agent in self.agents):
            assert time.monotonic() < deadline, "\n".join(agent.text for agent in self.agents)
            time.sleep(0.05)

    def event(self) -> None:
        self.agents, over = (
            [a for a in self.agents if not a.has_ended],
            [a for a in self.agents if a.has_ended],
        )
        self.gone += over
        if not self.agents:
            return
        victim = self.source.choice(self.agents)
        kind = self.source.choice(["worker killed", "node killed", "Ctrl-C", "node leaves"])
        self.happened[kind] += 1
        if kind == "worker killed":
            pids = list(workers_of(victim.pid).values())
            if pids:
                os.kill(self.source.choice(pids), signal.SIGKILL)
            return
        leaving = self.agents if kind == "Ctrl-C" else [victim]
        for agent in leaving:
            if kind == "Ctrl-C":
                agent.press_ctrl_c()
            elif kind == "node leaves":
                os.kill(agent.pid, signal.SIGTERM)
            else:
                agent.kill()
        for agent in [*leaving]:
            agent.wait()
            self.agents.remove(agent)
            self.gone.append(agent)

    def end(self) -> None:
        for agent in [*self.agents]:
            assert agent.wait() in (0, 75), agent.text
            self.agents.remove(agent)
            self.gone.append(agent)

    def check(self) -> tuple[str, float]:
        """What it came to, in a line; by how many percent the account is wrong."""
        lines = read_ledger(RunDir(self.folder / "run"))
        found = stretches(lines)
        early = late = 0.0  # seconds that are in no account, of the agent that has most of them
        for agent in self.gone:
            mine = [one for one in found if one.node.endswith(f"-{agent.pid}")]
            if not mine:  # it was killed before it could say anything
                early = max(early, agent.ended - agent.began)
                continue
            assert agent.began - 0.1 <= mine[0].start, "it was not there yet"
            assert mine[-1].stop <= agent.ended + 0.2, "it was gone"
            early, late = max(early, mine[0].start - agent.began), max(late, agent.ended - mine[-1].stop)
        account, outside = goodput(lines), sum(agent.ended - agent.began for agent in self.gone)
        assert abs(sum(account.seconds.values()) - account.total) < 1e-6 and min(account.seconds.values()) >= 0
        error = 100 * abs(account.total - outside) / outside
        told = ", ".join(f"{cause} {s:.1f}" for cause, s in account.seconds.items() if s >= 0.05)
        events = ", ".join(f"{kind} {count}x" for kind, count in self.happened.items())
        return (
            f"{self.num_nodes} nodes{f' and {self.num_more} more' * bool(self.num_more)}, {len(self.gone)} agents, {events}:"
            f" {account.total:.2f} s by cause, {outside:.2f} s by the clock: {error:.2f}% (of one agent at most"
            f" {early:.2f} s at its beginning and {late:.2f} s at its end are missing); {told}",
            error,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    worst = 0.0
    for number in range(options.runs):
        with tempfile.TemporaryDirectory(prefix="accounts-") as folder:
            one = Run(Path(folder), random.Random(options.seed + number))
            one.run()
            line, error = one.check()
            print(f"{number + 1}: {line}", flush=True)
            worst = max(worst, error)
    print(f"the worst account is {worst:.2f}% from the clock; {MOST:g}% are allowed")
    sys.exit(worst > MOST)


if __name__ == "__main__":
    main()
