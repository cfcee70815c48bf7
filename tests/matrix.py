"""Every mesh through every kind of change of its nodes and workers, with real agents on this machine.

    python -m tests.matrix [--meshes dp_shard hsdp tp pp 3d auto] [--workers 1 2 mixed] [--nodes 4]
                           [--scenarios NAME …] [--seed 0] [--folder DIR]

For each mesh and number of workers there is one run, which goes through the scenarios one after another; after each of them,
lost nodes are replaced. What is checked after each change:

* the processes of workers that were not killed are the same, also of nodes that stood by or waited;
* the state that a generation begins with is, bit by bit, what the one before had at that step, whatever the two meshes are
  (or an older one: where a step was done twice, what was saved of it may be of the first time);
* ranks that hold the same part of a tensor hold the same bits;
* where no mesh can be formed with the nodes that are there, nobody trains, the nodes say so, and once there are enough they
  go on where they were.

And in the end, of the whole run: every sample is used as often as it should be, every step that was ever done, those done
twice too, has the loss of a run on one rank that nobody has disturbed, within 1e-6, and planned changes have lost no step.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastictrain.cli.control import control_of
from elastictrain.config import MeshConfig
from elastictrain.elastic import crew
from elastictrain.elastic.fit import Fit
from elastictrain.rundir import RunDir
from tests.cluster import LIMIT, Agent, kill
from tests.meshed import MESHES, Calm, Meshed
from tests.processes import is_running

FREEZE = 4.0  # seconds; longer than a node may be silent
DOWN = 1.5  # seconds that storage is down: several times as long as survivors take to go on
LET_GO = 40.0  # seconds that a worker may take to let go of its generation: a machine may be slow and loaded
PHASES = ("teardown", "setup", "build", "restore", "forward")  # of a recovery, in their order


@dataclass
class Matrix(Meshed):
    """A run, and what can happen to it."""

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
            if not self.num_wanted:  # nobody restores before there is another one
                self.join()
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
