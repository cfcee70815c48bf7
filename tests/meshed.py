"""One run of real agents in one mesh, and what it is compared with: what :mod:`tests.matrix` sends through its scenarios."""

from __future__ import annotations

import contextlib
import json
import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from elastictrain.checkpoint.manifest import step_name
from elastictrain.config import MeshConfig
from elastictrain.elastic.fit import Fit
from elastictrain.metrics.ledger import read_ledger
from elastictrain.rundir import RunDir
from tests.cluster import LIFE, LIMIT, Agent, Cluster, forked
from tests.processes import is_running

TARGET = f"{Path(__file__).with_name('matrix_task.py')}:Whole"
MESHES = {
    "dp_shard": ["dp_shard=-1"],
    "hsdp": ["dp_replicate=-1,dp_shard=2"],
    "tp": ["dp_shard=-1,tp=2"],
    "pp": ["dp_shard=-1,pp=2"],
    "3d": ["dp_shard=-1,pp=2,tp=2"],
    # pp=2, dp_shard=2, tp=2 on four nodes of two workers, pp=3, tp=2 on three, pp=2, tp=2 on two
    "auto": ["auto", "--device-memory", "270KiB"],
}
CHECKPOINT_EVERY = 25
CALM = 4  # steps from one scenario to the next
WAITS = "waiting for nodes"


@dataclass
class Meshed(Cluster):
    """One run of one mesh.

    Args:
        mesh: as the command has it.
        is_mixed: nodes have one worker more and one less in turn.
    """

    target: str = TARGET
    mesh: str = "auto"
    is_mixed: bool = False
    chance: random.Random = field(default_factory=random.Random)
    sizes: dict[int, int] = field(default_factory=dict)  # of the nodes, by their agents
    most: int | None = None  # nodes that the run may have, where it was made smaller
    waited_at: int | None = None  # the newest step, where nobody trains for want of nodes
    num_gone: int = 0  # nodes that were there after the last repair, and were gone as nobody trained
    pids: dict[int, set[int]] = field(default_factory=dict)  # of the workers that are to live on, by their agent
    training: set[int] = field(default_factory=set)  # those of them that were in the newest generation
    checked: int = 0  # the newest generation whose beginning was compared

    @classmethod
    def of(cls, folder: Path, mesh: str, *, num_nodes: int, seed: int = 0) -> Self:
        """Of one of the meshes that have a name."""
        options = ["--mesh", *MESHES[mesh], "--spares", "0", "--checkpoint-every", str(CHECKPOINT_EVERY)]
        return cls(folder, num_nodes, options=options, mesh=MESHES[mesh][0], chance=random.Random(seed))

    def join(self, *, workers: int | None = None) -> Agent:
        count = workers or (1 + self.num_started % 2 if self.is_mixed else self.workers)
        agent = super().join(workers=count)
        self.sizes[agent.pid] = count
        return agent

    @property
    def num_wanted(self) -> int:
        return self._num_ranks_of(self.agents)

    def _num_ranks_of(self, agents: list[Agent]) -> int:
        """How many would train, if these were all nodes."""
        sizes = [self.sizes[one.pid] for one in agents][: self.most]
        places = Fit(*MeshConfig.parse(self.mesh).fit).choose(sizes)
        return sum(sizes[place] for place in places) if len(places) >= self.min_nodes else 0

    @property
    def others(self) -> list[Agent]:
        """All nodes but the one that leads, the newest first."""
        leader = self.leader()
        return [one for one in reversed(self.agents) if one is not leader]

    def generation(self) -> int:
        return max((self._last_of(file)[0] for file in self.folder.glob("samples-*")), default=-1)

    # ---- before and after --------------------------------------------------------------------------------------------

    def begin(self) -> None:
        (self.folder / "storage").mkdir()
        (self.folder / "run").symlink_to(self.folder / "storage")
        for _ in range(self.num_nodes):
            self.join()
        self.wait_for(CALM)
        self.settle()
        self.remember()

    @contextlib.contextmanager
    def ending(self) -> Iterator[None]:
        """The run is stopped in the end, and no process is left in any case."""
        try:
            yield
            self.stop()
        finally:
            self.thaw(all_of_them=True)
            for agent in list(self.agents):
                self.lose(agent)

    def remember(self) -> None:
        self.pids = {one.pid: set(self.workers_of(one)) for one in self.agents}
        self.training = {pid for pid, _ in self.newest_states().values()}

    def spare(self, *killed: int) -> None:
        """These need not live on."""
        for pids in self.pids.values():
            pids.difference_update(killed)

    def go_on(self, *, after: int | None) -> None:
        """Until all nodes that are there train together, in a generation after that one, or wait as they should.

        Where those who trained are as they were, as a node that stood by has gone, no other generation need come. So it
        is where the others cannot train without an agent that is stopped: its workers go on meanwhile.
        """
        stopped = {pid for _, pid in self.frozen}
        others = [one for one in self.agents if one.pid not in stopped]
        here = others if self._num_ranks_of(others) else self.agents
        kept = {pid for one in here for pid in self.pids.get(one.pid, ())}
        if self.training <= kept and self.num_ranks() == self.num_wanted:
            after = None
        deadline = time.monotonic() + LIMIT
        while self.num_wanted and (self.frozen or not self._is_together(after)):
            self.look()  # a node that something else has killed is seen here: they may be too few then
            assert self.agents and time.monotonic() < deadline, f"they do not find together\n{self.said}"
            time.sleep(0.05)
        if self.num_wanted:
            self.wait_for(self.newest_step() + CALM)
            self.training = {pid for pid, _ in self.newest_states().values()}
        else:
            self.wait_as_it_should()
        self.check_processes()

    def _is_together(self, after: int | None) -> bool:
        return (after is None or self.generation() > after) and self.num_ranks() == self.num_wanted

    def wait_as_it_should(self) -> None:
        deadline = time.monotonic() + LIMIT
        while not all(one.text.rstrip().rsplit("\n", 1)[-1].find(WAITS) >= 0 for one in self.agents):
            self.look()
            assert time.monotonic() < deadline, f"they do not say that they wait\n{self.said}"
            time.sleep(0.05)
        self.waited_at = self.newest_step()
        self.num_gone = len(self.pids.keys() - {one.pid for one in self.agents})
        time.sleep(1.0)
        assert self.newest_step() == self.waited_at, f"it trains, and should wait\n{self.said}"

    def repair(self) -> None:
        """As many nodes as there were."""
        self.look()
        before, missing = self.generation(), self.num_nodes - len(self.agents)
        for _ in range(missing):
            self.join()
        if missing:
            self.go_on(after=before)
        self.remember()

    def check_processes(self) -> None:
        for agent in self.agents:
            here = set(self.workers_of(agent))
            gone = {pid for pid in self.pids.get(agent.pid, set()) - here if not is_running(pid)}
            assert not gone, f"agent {agent.pid} had workers {sorted(gone)}, and nobody has killed them\n{self.said}"

    # ---- what it came to ---------------------------------------------------------------------------------------------

    def newest_states(self) -> dict[int, tuple[int, list[str]]]:
        """By rank: the process, and what it has noted of the newest step."""
        states = States(self.folder)
        generation = max(generation for generation, _ in states.found)
        return states.found[generation, max(step for at, step in states.found if at == generation)]

    def check_states(self) -> int:
        """How many tensors were compared."""
        states = States(self.folder)
        first: dict[int, int] = {}
        for generation, step in states.found:
            first[generation] = min(step, first.get(generation, step))
        compared = 0
        for generation in sorted(one for one in first if one > self.checked):
            step = first[generation]
            now, wrong = states.whole(generation, step), dict[int, list[str]]()
            # A step that was done twice is what the one or the other had: of the first time there may be a checkpoint.
            for before in sorted((one for one, at in states.found if at == step and one < generation), reverse=True):
                then = states.whole(before, step)
                both = now.keys() & then.keys()
                wrong[before] = sorted(name for name in both if now[name] != then[name])
                if not wrong[before]:
                    compared += len(both)
                    break
            else:
                assert not wrong, f"step {step} began in generation {generation} unlike in those before: {wrong}"
        self.checked = max(first)
        if self.waited_at is not None:
            self._check_what_was_kept(first[self.checked])
            self.waited_at = None
        states.whole(self.checked, max(step for at, step in states.found if at == self.checked) - 1)
        return compared

    def _check_what_was_kept(self, step: int) -> None:
        """Those that waited went on from memory, or from what was saved.

        That is so where too few would have stayed, since all stop and save then; and where several nodes were gone, since
        one of them may have held the copies of another one's part.
        """
        lines = read_ledger(RunDir(str(self.folder / "run")))
        newest = [line for line in lines if line["event"] == "recovery"][-1]
        is_saved = newest["planned"] and f"/{step_name(step)}/" in newest["source"]
        is_bounded = self.num_gone > 1 and newest["lost_steps"] <= CHECKPOINT_EVERY
        is_kept = newest["source"] == f"the snapshot of step {step} in memory"
        assert is_kept or is_saved or is_bounded, f"{newest}\n{self.said}"

    def check_run(self, calm: Calm) -> str:
        losses, lines = self.losses(), read_ledger(RunDir(str(self.folder / "run")))
        num_steps = max(losses)
        expected = calm.losses(num_steps)
        assert sorted(losses) == list(range(1, num_steps + 1)), "steps are left out"
        apart = {step: max(abs(one - expected[step]) for one in found) for step, found in losses.items()}
        assert max(apart.values()) < 1e-6, {step: far for step, far in apart.items() if far >= 1e-6}
        self.check_samples(num_steps)
        changes = [line for line in lines if line["event"] == "recovery"]
        lost = [change["lost_steps"] for change in changes if change["planned"]]
        assert not any(lost), f"planned changes have lost steps: {lost}"
        sudden = sorted(change["lost_steps"] for change in changes if not change["planned"])
        return f"{num_steps} steps, losses within {max(apart.values()):.0e}; lost steps of sudden changes: {sudden}"


class States:
    """What all ranks have written down: ``found[generation, step][rank]`` is the process and its numbers."""

    def __init__(self, folder: Path) -> None:
        self.found: dict[tuple[int, int], dict[int, tuple[int, list[str]]]] = {}
        self._boxes: dict[tuple[int, int, int], list[Any]] = {}
        for file in folder.glob("states-*"):
            rank = int(file.name.split("-")[1])
            for line in file.read_text().split("\n")[:-1]:
                generation, step, pid, numbers = line.split(" ")
                self.found.setdefault((int(generation), int(step)), {})[rank] = int(pid), numbers.split(",")
        for file in folder.glob("boxes-*"):
            rank = int(file.name.split("-")[1])
            for line in file.read_text().split("\n")[:-1]:
                generation, count, boxes = line.split(" ", 2)
                self._boxes[int(generation), rank, int(count)] = json.loads(boxes)

    def whole(self, generation: int, step: int) -> dict[str, int]:
        """By tensor, of those of which all is there: the number of all of it.

        Raises:
            AssertionError: two ranks hold different bits of one part.
        """
        parts: dict[str, dict[str, int]] = {}
        sizes: dict[str, int] = {}
        for rank, (_, numbers) in self.found[generation, step].items():
            for box, text in zip(self._boxes[generation, rank, len(numbers)], numbers, strict=True):
                name, shape, _, _ = box
                held, key = parts.setdefault(name, {}), json.dumps(box)
                assert held.setdefault(key, int(text, 16)) == int(text, 16), f"{box} differs in step {step}"
                sizes.setdefault(name, math.prod(shape))
        return {
            name: sum(held.values()) % 2**64
            for name, held in parts.items()
            if sum(math.prod(json.loads(key)[3]) for key in held) == sizes[name]
        }


class Calm:
    """A run on one rank to which nothing happens; it goes on as far as somebody asks."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._found: dict[int, float] = {}

    def losses(self, num_steps: int) -> dict[int, float]:
        if num_steps > len(self._found):
            self._folder.mkdir(exist_ok=True)
            like = Meshed(self._folder, 1)
            options = ["--nproc-per-node", "1", "--val-every", str(num_steps + 1)]
            run = forked(self._folder / "out", like.command(self._folder, num_steps, *options))
            assert run.wait(LIFE) == 0, run.text
            self._found = like.newest_losses()
        return self._found
