"""Random events in one long run: nodes are killed, stopped, told to leave, and join; some of it at the same time.

    python -m tests.soak [--events 200] [--seed 0] [--nodes 3] [--minutes M] [--folder DIR]

Agents are real processes of ``elastictrain run`` on one run directory, on this machine. A seed draws all events beforehand:
what happens to the how manyth of the nodes that are there, which of it at the same time, how long something stays stopped.
When that meets the run is the machine's affair.

In the end every sample has been used exactly as often as it should, and the losses are those of a run that nobody has
disturbed; whoever was not killed has kept its worker's process (:class:`Soak.survive`); no process holds more and more of
anything (:mod:`tests.holdings`), and nothing is left.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import signal
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from elastictrain import Trainer
from tests.cli.lives_task import Lives, workers_of
from tests.cluster import BATCH, LIMIT, Agent, Cluster, executed, last_line
from tests.helpers import run_ranks
from tests.holdings import MARK, Watch
from tests.processes import parent_of

CALM = 4  # steps between two events
FREEZE = (0.3, 5.0)  # seconds
JOIN = 0.4  # of the times that there is room for another node, it comes
TWICE = 0.3  # of the times that something happens, it is two things at once
SETTLED = 0.7  # of them, what was before is over
FURTHER = 2.0  # times as far from an undisturbed run as two of these are from each other on different numbers of ranks
ROUNDING = 1e-6  # of a loss: nearer than that is the same


@dataclass(frozen=True)
class Event:
    """``which`` of the nodes that it may happen to, oldest first; ``seconds`` that something stays stopped."""

    what: str
    which: int
    seconds: float


@dataclass(frozen=True)
class Blow:
    """What happens at the same time; ``settled``: only when those that are there train together again."""

    events: tuple[Event, ...]
    settled: bool


def draw(seed: int, *, num_events: int, num_nodes: int) -> list[Blow]:
    """All that happens to a run of so many nodes. One of them is always left alone."""
    chance, blows, there, left = random.Random(seed), list[Blow](), num_nodes, num_events
    while left:
        events, hit = list[Event](), 0
        for _ in range(2 if left > 1 and chance.random() < TWICE else 1):
            ways: list[str] = []
            if there - hit > 0:
                ways += ["worker killed", "worker stopped"]
            if there - hit > 1:
                ways += ["leader killed", "leader stopped", "node killed", "node stopped", "node leaves"]
            joins = there < num_nodes and (not ways or chance.random() < JOIN)
            what = "join" if joins else chance.choice(ways)
            events.append(Event(what, chance.randrange(max(1, there - hit)), chance.uniform(*FREEZE)))
            if what == "join":
                there += 1
            elif what in ("leader killed", "node killed", "node leaves"):
                there -= 1
            else:
                hit += 1
        left -= len(events)
        blows.append(Blow(tuple(events), chance.random() < SETTLED))
    return blows


@dataclass
class Soak(Cluster):
    """One run, and what has happened to it.

    Args:
        is_forked: workers are forked from their agents.
    """

    is_forked: bool = False
    happened: Counter[str] = field(default_factory=Counter)
    trained: dict[int, int] = field(default_factory=dict)  # workers, by their agents, when it was calm last
    hit: set[int] = field(default_factory=set)  # agents whose workers were killed since
    survived: Counter[bool] = field(default_factory=Counter)
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __post_init__(self) -> None:
        self.watch = Watch(self.folder, self.mark)
        self.options = [*self.options, "--checkpoint-every", "25"]  # where a node dies with its buddy
        self.options += ["--callback", f"tests.holdings:Counting:folder={self.folder}"]

    # ---- what happens ----------------------------------------------------------------------------------------------

    def start(self, out: Path, argv: Sequence[str]) -> Agent:
        return executed(out, argv, {MARK: self.mark}, module="tests.forked" if self.is_forked else "elastictrain")

    def strike(self, event: Event, away: set[int]) -> None:
        """``away``: agents that something happens to already.

        Whoever is left alone must be one that trains: where all of these are gone, a node that comes has storage alone.
        """
        if event.what != "join" and not event.what.startswith("worker"):
            self.wait_until(lambda: len(set(self.training()) - self.leaving - away) > 1, "two nodes train")
        free = [one for one in self.agents if one.pid not in self.leaving | away]
        if event.what == "join":
            self.join()
        elif not free:  # all others have left meanwhile
            return
        else:
            free = [one for one in free if one.pid in self.training()] or free
            agent = free[event.which % len(free)]
            if event.what.startswith("leader") and (leader := self.leader()) in free:
                agent = leader if leader is not None else agent
            away.add(agent.pid)
            self.do(event, agent)
        self.happened[event.what] += 1
        print(
            f"{sum(self.happened.values())}: {event.what}, {len(self.agents)} nodes, step {self.newest_step()}",
            flush=True,
        )

    def do(self, event: Event, agent: Agent) -> None:
        whom, how = event.what.split()
        if whom == "worker":
            worker = self.training().get(agent.pid) or next(iter(workers_of(agent.pid)), None)
            if worker is not None and how == "stopped":
                self.freeze(worker, event.seconds)
            elif worker is not None:
                self.hit.add(agent.pid)
                os.kill(worker, signal.SIGKILL)
        elif how == "stopped":
            self.freeze(agent.pid, event.seconds)
        elif how == "leaves":
            self.leave(agent)
        else:
            self.lose(agent)

    # ---- waiting ---------------------------------------------------------------------------------------------------

    def newest_step(self) -> int:
        """Of the newest generation that has trained."""
        return max((place[:2] for place in self.places()), default=(-1, -1))[1]

    def places(self) -> list[tuple[int, int, int]]:
        """``(generation, step, pid)`` that the worker of each rank has written last."""
        lines = [last_line(file).split() for file in self.folder.glob("states-*")]
        return [(int(line[0]), int(line[1]), int(line[2])) for line in lines if line]

    def members(self) -> list[int]:
        """Workers of the newest generation that has trained."""
        found = self.places()
        newest = max((generation for generation, *_ in found), default=0)
        return [pid for generation, _, pid in found if generation == newest]

    def training(self) -> dict[int, int]:
        """Those that have trained last, by their agents."""
        found = {}
        for pid in self.members():
            try:
                found[parent_of(pid)] = pid
            except OSError:  # it has just ended
                continue
        return found

    def wait_for(self, step: int) -> None:
        self.wait_until(lambda: self.newest_step() >= step, f"step {step} is reached")

    def wait_until(self, happens: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + LIMIT
        while not happens():
            self.thaw()
            for agent in [one for one in self.agents if one.poll() is not None]:
                assert agent.pid in self.leaving, f"an agent has ended, exit code {agent.poll()}\n{self.said}"
                self.agents.remove(agent)
            if not self.agents:
                self.join()
            if time.monotonic() > deadline:
                raise AssertionError(f"not within {LIMIT:g} s: {what}; {dict(self.happened)}\n{self.said}")
            time.sleep(0.02)

    def settle(self) -> None:
        """Until those that are there, and only those, train together."""
        self.wait_until(lambda: len(self.members()) == len(self.agents) and not self.frozen, "all nodes train together")
        self.survive()
        self.watch.look(self.members())

    def survive(self) -> None:
        """A node whose worker was not killed trains in the same process as before."""
        now = self.training()
        for agent, worker in now.items():
            if agent in self.trained and agent not in self.hit:
                self.survived[worker == self.trained[agent]] += 1
                if worker != self.trained[agent]:
                    print(
                        f"agent {agent}: worker {self.trained[agent]} was not killed, and is {worker} now", flush=True
                    )
        self.trained, self.hit = now, set()

    def run(self, blows: list[Blow], *, seconds: float) -> None:
        """``seconds``: after which nothing more happens, and the run is looked at as it is."""
        ends = time.monotonic() + seconds
        for _ in range(self.num_nodes):
            self.join()
        self.wait_for(CALM)
        self.settle()
        for blow in blows:
            if time.monotonic() > ends:
                print(f"the time is over, {sum(len(one.events) for one in blows)} events were drawn", flush=True)
                break
            away: set[int] = set()
            for event in blow.events:
                self.strike(event, away)
            self.wait_for(self.newest_step() + CALM)
            self.wait_until(lambda: not self.frozen, "what was stopped goes on")
            if blow.settled:
                self.settle()
        self.settle()
        self.wait_for(self.newest_step() + CALM)

    # ---- what it came to -----------------------------------------------------------------------------------------------

    def check(self) -> int:
        """Samples, losses, processes, and what they hold; the number of steps."""
        losses = self.newest_losses()
        num_steps, generations = max(losses), max(generation for generation, *_ in self.places())
        print(f"{num_steps} steps, {generations + 1} generations, {dict(self.happened)}")
        print(
            "\n".join([*self.watch.summary(), *(leaks := self.watch.leaks()), *(left := self.watch.left())]), flush=True
        )
        self.check_samples(num_steps)
        print(f"{num_steps * BATCH} samples, each used as often as it should be")
        self.check_losses(losses, num_steps)
        print(f"workers that were not killed: {self.survived[True]} were the same when it was calm again")
        assert not self.survived[False], f"{self.survived[False]} were not"
        assert not leaks and not left, [*leaks, *left]
        return num_steps

    def check_losses(self, losses: dict[int, float], num_steps: int) -> None:
        """Against two undisturbed runs of the same length, on one rank and on as many as there are nodes."""
        calm, wide = self.calm(num_steps, 1), self.calm(num_steps, self.num_nodes)
        assert sorted(losses) == sorted(calm) == sorted(wide) == list(range(1, num_steps + 1))
        apart = [min(abs(losses[step] - one[step]) for one in (calm, wide)) for step in sorted(losses)]
        between = max(abs(wide[step] - calm[step]) for step in calm)
        rounding = ROUNDING * max(losses.values())
        print(
            f"losses at most {max(apart):.1e} from those of an undisturbed run, which are {between:.1e} apart on 1 and on"
            f" {self.num_nodes} ranks: {max(apart) / max(between, rounding):.2f} of it, at most {FURTHER}"
        )
        assert max(apart[:20]) < rounding, apart[:20]
        assert max(apart) < FURTHER * max(between, rounding)

    def calm(self, num_steps: int, num_ranks: int) -> dict[int, float]:
        """The losses of a run to which nothing happens."""
        folder = self.folder / f"calm-{num_ranks}"
        folder.mkdir()

        def fit(rank: int, world_size: int) -> None:
            os.environ["TORCHELASTIC_RESTART_COUNT"] = "0"
            sys.stdout = sys.stderr = open(folder / f"said-{rank}", "w")  # noqa: SIM115 - until this process ends
            options = {"log_every": 1, "val_every": 10 * num_steps, "micro_batch_size": 1}
            Trainer(run_dir=str(folder / "run"), max_steps=num_steps, **options).fit(Lives(str(folder)))

        run_ranks(fit, num_ranks, timeout=60 + num_steps)
        return self.newest_losses(folder)


def soak(
    folder: Path, *, num_events: int, seed: int, num_nodes: int, minutes: float = math.inf, is_forked: bool = False
) -> Soak:
    one = Soak(folder, num_nodes, is_forked=is_forked)
    try:
        one.run(draw(seed, num_events=num_events, num_nodes=num_nodes), seconds=60 * minutes)
    finally:
        one.stop()
    one.check()
    return one


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--events", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=math.inf, help="after which nothing more happens")
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="soak-"))
    folder.mkdir(exist_ok=True)
    print(f"seed {options.seed}, in {folder}", flush=True)
    how = {"num_events": options.events, "seed": options.seed, "num_nodes": options.nodes, "minutes": options.minutes}
    soak(folder, **how)


if __name__ == "__main__":
    main()
