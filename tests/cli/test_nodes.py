"""``elastictrain run --nnodes`` with real trainers: nodes come, go and die, and the losses are those of a quiet run."""

from __future__ import annotations

import itertools
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from elastictrain import fit
from elastictrain.checkpoint import copies, memory
from elastictrain.elastic import crew, run_rendezvous
from elastictrain.metrics.goodput import USEFUL, stretches
from elastictrain.metrics.ledger import read_ledger
from elastictrain.rundir import RunDir
from tests import forked, meshed
from tests.cluster import Agent, kill
from tests.matrix import LET_GO, Matrix
from tests.meshed import Calm
from tests.processes import began_at, children_of

GONE = 3.0  # seconds that nodes wait for what a frozen one was to hand over
PART = 4.0  # seconds that a keeper which is stopped is waited for


@dataclass
class Nodes(Matrix):
    """
    Attributes:
        began: of each agent, when the kernel started its process.
        without: agents that were frozen, and from when until when the others trained without them.
    """

    began: dict[int, float] = field(default_factory=dict)
    without: dict[int, tuple[float, float]] = field(default_factory=dict)

    def join(self, *, workers: int | None = None) -> Agent:
        agent = super().join(workers=workers)
        self.began[agent.pid] = began_at(agent.pid)
        return agent

    def agents_frozen(self) -> None:
        """The leader and another one, for longer than a node may be silent: the others go on; then both come back."""
        frozen, rest = [self._leader(), self.others[0]], len(self.agents) - 2
        for one in frozen:
            one.send(signal.SIGSTOP)
        self.settle(rest)
        since = time.time()
        self.wait_for(self.newest_step() + 2)
        for one in frozen:
            self.without[one.pid] = since, time.time()
            one.send(signal.SIGCONT)

    def machine_frozen_as_it_hands_over(self) -> None:
        """It leaves, and at the agreed step all of it is stopped: no connection closes, and the others wait for its part."""
        leaving = self.others[0]
        machine = [*children_of(leaving.pid), leaving.pid]
        self._set_a_trap("hand-over", f"machine {leaving.pid}")
        self.leave(leaving)
        self._wait_for_the_trap("hand-over")
        self.settle(len(self.agents) - 1)
        for pid in machine:
            kill(pid, signal.SIGCONT)
        assert leaving.wait() == 75, leaving.text
        self.agents.remove(leaving)
        self.join()

    def keeper_stopped_as_others_restore(self) -> None:
        """It refuses nothing, and answers nothing: after a while what it holds is read from where its copy is."""
        victim, nodes = self.others[0], self._in_order()
        other = nodes[(nodes.index(victim) + 2) % len(nodes)]  # the one before alone has the victim's part
        keeper = self.keeper_of(other)
        self._set_a_trap("restore", f"{keeper} stopped")
        self.lose(victim)
        self._wait_for_the_trap("restore")
        self.settle()
        kill(keeper, signal.SIGCONT)
        self.join()

    def larger_nodes_join(self) -> None:
        """Two of two workers each."""
        before = self.generation()
        for _ in range(2):
            self.join(workers=2)
        self.go_on(after=before)

    def smaller_nodes_lost_at_once(self) -> None:
        """Neighbours: what the one held, only the other one had a copy of. What is left to go on from is on storage."""
        for one in [one for one in self.agents if self.sizes[one.pid] == 1]:
            self.lose(one)

    def lost_as_others_join(self) -> None:
        for _ in range(3):
            self.join()
        self.lose(next(one for one in self.others if self.sizes[one.pid] == 2))

    def check_accounts(self, lines: list[dict[str, Any]], *, stopping: float) -> None:
        """Each node's time is told without holes, from when the kernel started its agent; of those that were frozen, too."""
        now, by_node = time.time(), dict[int, list[Any]]()
        for one in stretches(lines):
            by_node.setdefault(int(one.node.rsplit("-", 1)[1]), []).append(one)
        assert by_node.keys() == self.began.keys()
        for pid, mine in by_node.items():
            assert mine[0].start == pytest.approx(self.began[pid], abs=0.1)
            assert all(
                before.stop == pytest.approx(after.start, abs=1e-3) for before, after in itertools.pairwise(mine)
            )
            assert all(sum(one.seconds.values()) == pytest.approx(one.stop - one.start, abs=1e-3) for one in mine)
            assert mine[-1].stop < now and (mine[-1].stop > stopping) == (pid in self.pids), "to its end"
        for pid, (since, until) in self.without.items():
            meanwhile = [one for one in by_node[pid] if one.stop > since and one.start < until]
            useful = sum(one.seconds.get(cause, 0.0) for one in meanwhile for cause in USEFUL)
            assert useful <= sum(one.stop - one.start for one in meanwhile) - (until - since)
            assert sum(one.seconds.get("detect", 0.0) for one in meanwhile) >= until - since, meanwhile


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_nodes_come_go_and_die_and_the_losses_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As reported in kubeflow/trainer#1638, NVRx#348: one pod was deleted, and all restarted; a restored replica gave
    NaN three iterations later. Here each change is one of the mesh, too, and after each the state is compared, bit by bit.
    """
    monkeypatch.setattr(crew, "LET_GO_SECONDS", LET_GO)
    monkeypatch.setattr(meshed, "CALM", 2)
    monkeypatch.setattr(fit, "HAND_OVER_SECONDS", 1.0)  # else a keeper that is stopped is waited for that long
    monkeypatch.setattr(run_rendezvous, "GONE_SECONDS", GONE)
    monkeypatch.setattr(copies, "PART_SECONDS", PART)
    monkeypatch.setattr(memory, "PART_SECONDS", PART)
    folder = tmp_path / "nodes"
    folder.mkdir()
    run = Nodes.of(folder, "auto", num_nodes=4)
    assert isinstance(run, Nodes)
    run.options = [*run.options, "--device-memory", "410KiB", "--checkpoint-every", "10", "--val-every", "25"]
    run.before = forked.install
    meshes: dict[Any, str] = {  # that the planner chooses for the nodes which a change leaves
        Nodes.agents_frozen: "pp=2, dp_shard=2",
        Nodes.machine_frozen_as_it_hands_over: "pp=2, dp_shard=2",
        Nodes.keeper_stopped_as_others_restore: "pp=2, dp_shard=2",
        Nodes.keeper_killed_as_others_restore: "pp=3",
        Nodes.storage_down_as_node_dies: "pp=2",
        Nodes.larger_nodes_join: "dp_shard=6",
        Nodes.smaller_nodes_lost_at_once: "dp_shard=2, tp=2",
        Nodes.lost_as_others_join: "dp_shard=5",
        Nodes.keeper_stopped_as_node_leaves: "pp=2, dp_shard=2",
        Nodes.scaled_down_as_node_dies: "",
    }
    with run.ending():
        run.begin()
        for change in meshes:
            before = run.generation()
            change(run)
            if change not in (Nodes.larger_nodes_join, Nodes.scaled_down_as_node_dies):
                run.go_on(after=before)
            assert run.check_states(), change
            run.remember()
        stopping = time.time()
    run.check_run(Calm(tmp_path / "calm"))
    lines = read_ledger(RunDir(folder / "run"))
    run.check_accounts(lines, stopping=stopping)
    changes = [line for line in lines if line["event"] == "recovery"]
    assert {line["mesh"] for line in changes} >= {*filter(None, meshes.values())}, changes
    assert {line["planned"] for line in changes} == {True, False}, changes
    check_sources(changes)


def check_sources(changes: list[dict[str, Any]]) -> None:
    """What was read as a keeper went was in another one's memory; what two nodes alone had was on storage."""
    sudden = [line for line in changes if not line["planned"]]
    _machine_frozen, keeper_stopped, keeper_killed = [line for line in sudden if line["mesh"] == "pp=3"][:3]
    for line in (keeper_stopped, keeper_killed):
        assert line["source"] == f"the snapshot of step {line['resumed_step']} in memory", line
    assert keeper_stopped["seconds"]["restore"] > PART, "nobody has waited for it"
    both_lost = next(line for line in sudden if line["mesh"] == "dp_shard=2, tp=2")
    assert f"/checkpoints/step-{both_lost['resumed_step']:08}/" in both_lost["source"]
