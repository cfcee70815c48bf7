"""Ten random runs with faults, of which every node-second must have one cause: real agents, workers, signals and ledgers.

    python -m tests.accounts [--runs 10] [--seed 0]

Each run has one node with two workers, or two nodes with one. On its way workers and nodes are killed, nodes leave, all are
stopped by Ctrl-C, and what is gone is started again. Measured is from outside: when each agent was started, and when it had
ended or was killed. Compared with that is the goodput that the ledger tells.

The sum over causes must be, within 1%, the time between the first and the last thing that is known of each agent; the first
one no earlier than its start, the last one no later than its end, and no earlier than the last step that its workers did.
Of a node that is killed the last seconds are known to nobody, and are not in it; nor are those of one that ends before it
has started again after the death of a worker. The last column tells how much of all the time that was, with what an agent's
end takes behind its last account: its workers' exit and its own, when nothing is written any more.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from elastictrain.metrics.courier import interval
from elastictrain.metrics.goodput import goodput, stretches
from elastictrain.metrics.ledger import read_ledger
from elastictrain.rundir import RunDir
from tests.cli.measured_task import notes
from tests.cli.test_run import Command, workers_of
from tests.cli.test_snapshots import keeper_of

TASK = f"{Path(__file__).parent / 'cli' / 'measured_task.py'}:Measured"
STEPS, CALM = 60, 8  # steps of a run; at least so many between two events
OPTIONS = (
    "--log-every 1 --checkpoint-every 5 --snapshot-every 5 --micro-batch-size 4 --local-addr 127.0.0.1 --max-restarts 9"
)
PATIENCE = 300.0
SLACK = 2.0  # seconds between what is measured here and the same moment there


class Agent(Command):
    limit = 2 * PATIENCE

    def __init__(self, folder: Path, *argv: str) -> None:
        self.began, self.ended, self.code = time.time(), 0.0, 0
        self.is_killed, self.was_hit = False, 0.0  # it; when one of its workers was
        super().__init__(folder, *argv)

    def poll(self) -> int | None:
        """The exit code, if it has ended."""
        if not self.ended:
            done = os.waitpid(self.pid, os.WNOHANG)
            if done[0]:
                self.ended, self.code = time.time(), os.waitstatus_to_exitcode(done[1])
        return self.code if self.ended else None

    def wait(self) -> int:
        deadline = time.monotonic() + self.limit
        while (code := self.poll()) is None:
            assert time.monotonic() < deadline, self.text
            time.sleep(0.01)
        return code

    def kill(self) -> None:
        """The whole node."""
        self.is_killed = True
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
                os.killpg(agent.pid, signal.SIGKILL)

    def start(self) -> None:
        """As many nodes as there should be."""
        while len(self.agents) < self.num_nodes:
            folder = self.folder / str(len(self.agents) + len(self.gone))
            folder.mkdir()
            options = [TASK, "--run-dir", str(self.folder / "run"), "--max-steps", str(STEPS), *OPTIONS.split()]
            options += ["--nnodes", f"1:{self.num_nodes}", "--nproc-per-node", str(3 - self.num_nodes), "--spares", "0"]
            self.agents.append(Agent(folder, *options, "--set", f"folder={self.folder}", "--set", "pace=0.1"))

    def reached(self) -> int:
        return sum(note["what"] == "step" and note["rank"] == 0 for note in notes(self.folder))

    def wait_for(self, count: int) -> None:
        deadline = time.monotonic() + PATIENCE
        while self.reached() < count and any(agent.poll() is None for agent in self.agents):
            assert time.monotonic() < deadline, "\n".join(agent.text for agent in self.agents)
            time.sleep(0.05)

    def event(self) -> None:
        self.agents, over = (
            [a for a in self.agents if a.poll() is None],
            [a for a in self.agents if a.poll() is not None],
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
                victim.was_hit = time.time()
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

    def check(self) -> str:
        """What it came to, in a line."""
        lines = read_ledger(RunDir(self.folder / "run"))
        found = stretches(lines)
        known = outside = 0.0
        for agent in self.gone:
            mine = [one for one in found if one.node.endswith(f"-{agent.pid}")]
            if not mine:
                continue  # it ended before its first start
            outside += agent.ended - agent.began
            first, last = mine[0].start, mine[-1].stop
            seen = [note["time"] for note in notes(self.folder) if note["agent"] == agent.pid]
            assert agent.began - 0.1 <= first, "it was not there yet"
            assert last <= agent.ended + 0.1, "it was gone"
            is_cut = agent.is_killed or last < agent.was_hit + SLACK  # it ended before it had started again
            unwritten = interval(last - first) + SLACK if is_cut else 0.1
            assert last >= max(seen) - unwritten, f"{max(seen) - last:.1f} s of its steps are not told"
            known += last - first
        account = goodput(lines)
        assert abs(account.total - known) <= 0.01 * known, (account.total, known)
        assert abs(sum(account.seconds.values()) - account.total) < 1e-6 and min(account.seconds.values()) >= 0
        error = 100 * abs(account.total - known) / known
        unknown = 100 * (1 - known / outside)
        told = ", ".join(f"{cause} {s:.1f}" for cause, s in account.seconds.items() if s >= 0.05)
        events = ", ".join(f"{kind} {count}x" for kind, count in self.happened.items())
        return (
            f"{self.num_nodes} nodes, {len(self.gone)} agents, {events}: {account.total:.1f} s by cause, {error:.3f}% from"
            f" {known:.1f} s; {unknown:.1f}% of {outside:.1f} s not known; {told}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for number in range(options.runs):
        with tempfile.TemporaryDirectory(prefix="accounts-") as folder:
            one = Run(Path(folder), random.Random(options.seed + number))
            one.run()
            print(f"{number + 1}: {one.check()}", flush=True)


if __name__ == "__main__":
    main()
