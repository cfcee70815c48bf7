"""Every mesh through every kind of change of its nodes and workers, with real agents on this machine.

    python -m tests.matrix [--meshes dp_shard hsdp tp pp 3d auto] [--workers 1 2 mixed] [--nodes 4]
                           [--scenarios NAME …] [--seed 0] [--folder DIR]

For each mesh and number of workers there is one run, which goes through the scenarios one after another; after each of them,
lost nodes are replaced. What is checked after each change:

* the processes of workers that were not killed are the same, also of nodes that stood by or waited;
* the state that a generation begins with is, bit by bit, what the one before had at that step, whatever the two meshes are;
* ranks that hold the same part of a tensor hold the same bits;
* where no mesh can be formed with the nodes that are there, nobody trains, the nodes say so, and once there are enough they
  go on where they were.

And in the end, of the whole run: every sample is used as often as it should be, every step that was ever done, those done
twice too, has the loss of a run on one rank that nobody has disturbed, within 1e-6, and planned changes have lost no step.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elastictrain.cli.control import control_of
from elastictrain.config import MeshConfig
from elastictrain.elastic import crew
from elastictrain.elastic.fit import Fit
from elastictrain.metrics.ledger import read_ledger
from elastictrain.rundir import RunDir
from tests.cluster import LIFE, LIMIT, Agent, Cluster, forked, kill
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
CALM = 4  # steps from one scenario to the next
FREEZE = 4.0  # seconds; longer than a node may be silent
DOWN = 1.5  # seconds that storage is down: several times as long as survivors take to go on
LET_GO = 40.0  # seconds that a worker may take to let go of its generation: a machine may be slow and loaded
PHASES = ("teardown", "setup", "build", "restore", "forward")  # of a recovery, in their order
WAITS = "waiting for nodes"


@dataclass
class Matrix(Cluster):
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
    pids: dict[int, set[int]] = field(default_factory=dict)  # of the workers that are to live on, by their agent
    training: set[int] = field(default_factory=set)  # those of them that were in the newest generation
    checked: int = 0  # the newest generation whose beginning was compared

    @classmethod
    def of(cls, folder: Path, mesh: str, *, num_nodes: int, seed: int = 0) -> Matrix:
        """Of one of the meshes that have a name."""
        options = ["--mesh", *MESHES[mesh], "--spares", "0", "--checkpoint-every", "25"]
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
        if not self.num_wanted:
            self.wait_as_it_should()
        else:
            deadline = time.monotonic() + LIMIT
            while self.frozen or not self._is_together(after):
                self.look()
                assert self.agents and time.monotonic() < deadline, f"they do not find together\n{self.said}"
                time.sleep(0.05)
            self.wait_for(self.newest_step() + CALM)
            self.training = {pid for pid, _ in self.newest_states().values()}
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

    # ---- scenarios ---------------------------------------------------------------------------------------------------

    def worker_killed(self) -> None:
        victim = self._worker()
        kill(victim, signal.SIGKILL)
        self.spare(victim)

    def worker_stopped(self) -> None:
        """It goes on before anybody takes it for hung."""
        self.freeze(self._worker(), FREEZE)

    def worker_stopped_as_another_dies(self) -> None:
        """It does not let go of its generation in time, and is replaced; whatever it does when it wakes is of no effect."""
        agents = self.chance.sample(self.agents, 2)
        stopped, killed = (self.chance.choice(self.workers_of(one)) for one in agents)
        self.freeze(stopped, LET_GO + FREEZE)
        kill(killed, signal.SIGKILL)
        self.spare(stopped, killed)

    def agent_stopped(self) -> None:
        self.freeze(self.others[0].pid, FREEZE)

    def leader_stopped(self) -> None:
        self.freeze(self._leader().pid, FREEZE)

    def node_killed(self) -> None:
        self.lose(self.others[0])

    def leader_killed(self) -> None:
        self.lose(self._leader())

    def agent_killed(self) -> None:
        """Its workers end with it; its keeper does not."""
        victim = self.others[0]
        victim.send(signal.SIGKILL)
        victim.wait()
        self.agents.remove(victim)

    def node_leaves(self) -> None:
        self.leave(leaving := self.others[0])
        assert leaving.wait() == 75, leaving.text
        self.agents.remove(leaving)

    def leader_leaves(self) -> None:
        self.leave(leaving := self._leader())
        assert leaving.wait() == 75, leaving.text
        self.agents.remove(leaving)

    def two_lost(self) -> None:
        for victim in self.others[:2]:
            self.lose(victim)

    def two_leave(self) -> None:
        leaving = self.others[:2]
        for one in leaving:
            self.leave(one)
        for one in leaving:
            assert one.wait() == 75, one.text
            self.agents.remove(one)

    def lost_as_another_joins(self) -> None:
        self.lose(self.others[0])
        self.join()
        time.sleep(self.chance.uniform(0.0, 6.0))
        self.lose(self.others[-1])

    def lost_one_after_another(self) -> None:
        """Down to one node, or until those that are left can form no mesh."""
        while len(self.agents) > 1 and self.num_wanted:
            before = self.generation()
            self.lose(self.others[0])
            self.go_on(after=before)

    def storage_down_as_node_dies(self) -> None:
        """Nobody can be taken out until it is back; then the others go on from memory."""
        victim, run = self.others[0], self.folder / "run"
        real, none = run.resolve(), self.folder / "none"
        none.touch()
        point_to(run, none)
        before = self.generation()
        self.lose(victim)
        time.sleep(DOWN)
        self.look()
        assert self.generation() == before and victim not in self.agents
        point_to(run, real)

    def keeper_stopped_as_node_leaves(self) -> None:
        """It takes no snapshot and no copy: what is handed over is a checkpoint."""
        leaving, *staying = self.others
        keeper = self.keeper_of([*staying, self._leader()][0])
        kill(keeper, signal.SIGSTOP)
        try:
            self.leave(leaving)
            assert leaving.wait() == 75, leaving.text
        finally:
            kill(keeper, signal.SIGCONT)
        self.agents.remove(leaving)

    def keeper_killed_as_others_restore(self) -> None:
        """A node is lost; what another one's keeper holds is read from where its copy is, once it goes in the middle."""
        victim = self.others[0]
        nodes = self._in_order()
        if len(nodes) > 3 and victim in nodes:  # its buddy's keeper alone holds its part: the one after that may go
            other = nodes[(nodes.index(victim) + 2) % len(nodes)]
            self._set_a_trap("restore", str(self.keeper_of(other)))
            self.lose(victim)
            self._wait_for_the_trap("restore")
        else:
            self.lose(victim)

    def _in_order(self) -> list[Agent]:
        """The nodes that train, by their ranks: each one's keeper has the copies of the one before."""
        by_worker = {pid: one for one in self.agents for pid in self.workers_of(one)}
        return list(dict.fromkeys(by_worker[pid] for _, (pid, _) in sorted(self.newest_states().items())))

    def scaled_down_as_node_dies(self) -> None:
        """Of those that are left one more stands by, with its part of the state, and is then told to go."""
        victim, count = self.others[0], len(self.agents)
        left = [self.sizes[one.pid] for one in self.agents if one is not victim]
        if not Fit(*MeshConfig.parse(self.mesh).fit).choose(left[: count - 2]):
            return  # so few make no mesh
        control = control_of(RunDir(str(self.folder / "run")), "")
        assert control is not None
        before = self.generation()
        self.most = count - 2
        assert control.scale(least=1, most=self.most, seconds=LIMIT) is not None
        self.lose(victim)
        self.go_on(after=before)
        training = {pid for pid, _ in self.newest_states().values()}
        for aside in [one for one in self.agents if training.isdisjoint(self.workers_of(one))]:
            keeper = self.keeper_of(aside)
            self.leave(aside)
            assert aside.wait() == 75, aside.text
            self.agents.remove(aside)
            assert "stay for" not in aside.text, "the others hold as much"
            deadline = time.monotonic() + LIMIT
            while is_running(keeper):
                assert time.monotonic() < deadline, "its keeper is left"
                time.sleep(0.05)
        self.most = None
        assert control.scale(least=1, most=self.num_nodes, seconds=LIMIT) is not None

    def _kill_in(self, phase: str, how: str) -> None:
        """A worker is killed, and in that phase of the recovery another one, or a whole node."""
        self._set_a_trap(phase, how)
        victim = self._worker()
        kill(victim, signal.SIGKILL)
        self.spare(victim, self._wait_for_the_trap(phase))

    def _set_a_trap(self, phase: str, what: str) -> None:
        for file in self.folder.glob("sprung-*"):
            file.unlink()
        (new := self.folder / "new").write_text(what)
        new.rename(self.folder / f"trap-{phase}")

    def _wait_for_the_trap(self, phase: str) -> int:
        """Whoever came by."""
        deadline = time.monotonic() + LIMIT
        while not (sprung := list(self.folder.glob("sprung-*"))):
            self.look()
            assert time.monotonic() < deadline, f"nobody came by {phase}\n{self.said}"
            time.sleep(0.02)
        return int(sprung[0].name.split("-")[1])

    def _leader(self) -> Agent:
        deadline = time.monotonic() + LIMIT
        while (leader := self.leader()) is None:
            assert time.monotonic() < deadline, f"nobody leads\n{self.said}"
            time.sleep(0.05)
        return leader

    def _worker(self) -> int:
        """One that trains."""
        training = {pid for pid, _ in self.newest_states().values()}
        return self.chance.choice([pid for one in self.agents for pid in self.workers_of(one) if pid in training])

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
            now = states.whole(generation, step)
            before = max((one for one, at in states.found if at == step and one < generation), default=None)
            then = {} if before is None else states.whole(before, step)
            both = now.keys() & then.keys()
            wrong = sorted(name for name in both if now[name] != then[name])
            assert not wrong, f"step {step} began in generation {generation} unlike generation {before}'s: {wrong}"
            compared += len(both)
        self.checked = max(first)
        if self.waited_at is not None:
            source = f"the snapshot of step {first[self.checked]} in memory"
            assert any(source in one.text for one in self.agents), f"they did not go on from memory\n{self.said}"
            self.waited_at = None
        states.whole(self.checked, max(step for at, step in states.found if at == self.checked) - 1)
        return compared

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
            like = Matrix(self._folder, 1)
            options = ["--nproc-per-node", "1", "--val-every", str(num_steps + 1)]
            run = forked(self._folder / "out", like.command(self._folder, num_steps, *options))
            assert run.wait(LIFE) == 0, run.text
            self._found = like.newest_losses()
        return self._found


SCENARIOS = {
    "worker killed": Matrix.worker_killed,
    "worker stopped": Matrix.worker_stopped,
    "worker stopped as another dies": Matrix.worker_stopped_as_another_dies,
    "agent stopped": Matrix.agent_stopped,
    "leader stopped": Matrix.leader_stopped,
    "node killed": Matrix.node_killed,
    "leader killed": Matrix.leader_killed,
    "agent killed": Matrix.agent_killed,
    "node leaves": Matrix.node_leaves,
    "leader leaves": Matrix.leader_leaves,
    "two lost": Matrix.two_lost,
    "two leave": Matrix.two_leave,
    "lost as another joins": Matrix.lost_as_another_joins,
    "lost one after another": Matrix.lost_one_after_another,
    "storage down as node dies": Matrix.storage_down_as_node_dies,
    "keeper stopped as node leaves": Matrix.keeper_stopped_as_node_leaves,
    "keeper killed as others restore": Matrix.keeper_killed_as_others_restore,
    "scaled down as node dies": Matrix.scaled_down_as_node_dies,
    **{f"worker killed in {phase}": lambda one, phase=phase: one._kill_in(phase, "worker") for phase in PHASES},
    "node killed in restore": lambda one: one._kill_in("restore", "node"),
}
STAYS = ("worker stopped", "lost one after another", "scaled down as node dies")  # where nothing need change any more


def point_to(link: Path, where: Path) -> None:
    """At one moment: whoever looks finds the one or the other."""
    new = link.with_name("link")
    new.symlink_to(where)
    new.replace(link)


def play(one: Matrix, names: list[str], calm: Calm) -> Iterator[tuple[str, str]]:
    """The scenarios one after another: of each, and of joining again, what it came to."""
    with one.ending():
        one.begin()
        for name in names:
            started, before = time.monotonic(), one.generation()
            SCENARIOS[name](one)
            one.go_on(after=None if name in STAYS else before)
            num_left = len(one.agents)
            one.repair()
            compared = one.check_states()
            took = time.monotonic() - started
            yield name, f"passed in {took:.0f} s, on {num_left} nodes, {compared} tensors compared"
    yield "the whole run", one.check_run(calm)


def matrix(folder: Path, *, meshes: list[str], workers: list[str], num_nodes: int, names: list[str], seed: int) -> bool:
    """Print a line for each; whether all went well."""
    crew.LET_GO_SECONDS = LET_GO  # agents are forked
    calm, is_well = Calm(folder / "calm"), True
    for mesh in meshes:
        for count in workers:
            where = folder / f"{mesh}-{count}"
            where.mkdir()
            one = Matrix.of(where, mesh, num_nodes=num_nodes, seed=seed)
            one.is_mixed, one.workers = count == "mixed", 1 if count == "mixed" else int(count)
            last = "the start"
            try:
                for last, what in play(one, names, calm):
                    print(f"{mesh:9} {count:5} {last:32} {what}", flush=True)
                shutil.rmtree(where)
            except Exception:
                is_well = False
                (where / "failure").write_text(traceback.format_exc())
                line = traceback.format_exc().strip().rsplit("\n", 1)[-1][:200]
                print(f"{mesh:9} {count:5} after {last}: FAILED, see {where / 'failure'}: {line}", flush=True)
    return is_well


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--meshes", nargs="+", default=list(MESHES), choices=list(MESHES))
    parser.add_argument("--workers", nargs="+", default=["1", "2"])
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--scenarios", nargs="+", default=list(SCENARIOS), choices=list(SCENARIOS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that no agent is left
    folder = options.folder or Path(tempfile.mkdtemp(prefix="matrix-"))
    folder.mkdir(exist_ok=True)
    print(f"seed {options.seed}, in {folder}", flush=True)
    how: dict[str, Any] = {"meshes": options.meshes, "workers": options.workers, "names": options.scenarios}
    if not matrix(folder, num_nodes=options.nodes, seed=options.seed, **how):
        sys.exit(1)
    with contextlib.suppress(OSError):
        os.rmdir(folder)


if __name__ == "__main__":
    main()
