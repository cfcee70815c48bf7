"""Agents of several nodes, with real processes and signals: who comes, goes and dies, and at which step the others go on.

Workers are :mod:`tests.elastic.worker_program`, which starts in no time; a step is finished by all of them or by none.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters

from elastictrain.channel import key_of
from elastictrain.checkpoint.token import read_token
from elastictrain.elastic import run_rendezvous
from elastictrain.elastic.chain import Entry, Loss
from elastictrain.elastic.handler import BACKEND, create
from elastictrain.elastic.rendezvous import GenerationHandler
from elastictrain.elastic.runlog import RunLog
from elastictrain.rundir import RunDir
from tests.elastic.fleet import wait_for
from tests.elastic.test_agent import Run

FOR_EVER = 1_000_000


class Nodes:
    """Agents that share a run directory."""

    def __init__(self, folder: Path, nodes: tuple[int, int], **conf: float) -> None:
        self.folder, self.run_dir, self._nodes = folder, folder / "run", nodes
        self._conf = {"ttl": 10.0, "last_call_timeout": 0.1, **conf}
        self.runs: dict[str, Run] = {}

    def start(
        self,
        name: str,
        *,
        workers: int = 1,
        nnodes: tuple[int, int] | None = None,
        address: str = "127.0.0.1",
        **more: Any,
    ) -> Run:
        def meet(num_workers: int) -> GenerationHandler:
            parameters = RendezvousParameters(
                BACKEND, str(self.run_dir), "", *(nnodes or self._nodes), local_addr=address, **self._conf
            )
            made = create(parameters, num_workers=num_workers, has_steps=True, say=say)
            (self.folder / f"{name}.node").write_text(made._node.me.node)
            return made

        def say(line: str) -> None:
            print(line, file=sys.stderr, flush=True)

        how = {"steps": FOR_EVER, "pace": 0.005, **more}
        run = self.runs[name] = Run(self.folder, workers=workers, rendezvous=meet, name=name, **how)
        return run

    def kill(self, name: str) -> None:
        run = self.runs.pop(name)
        os.kill(run.pid, signal.SIGKILL)
        os.waitpid(run.pid, 0)

    def id_of(self, name: str) -> str:
        path = self.folder / f"{name}.node"
        return path.read_text() if path.exists() else "?"

    @property
    def entry(self) -> Entry:
        if not (self.run_dir / "token").exists():
            return Entry()
        return RunLog(RunDir(self.run_dir), key_of(read_token(RunDir(self.run_dir)))).newest()

    @property
    def leader(self) -> str:
        leader = self.entry.leader
        assert leader is not None
        return next(name for name in self.runs if self.id_of(name) == leader.node)

    def wait(self, *names: str, steps: int = 3) -> int:
        """Until exactly these are members and have trained so many steps together; the generation's number."""

        def is_so() -> bool:
            entry = self.entry
            if {one.node for one in entry.generation.members} != {self.id_of(name) for name in names}:
                return False
            number = entry.generation.number - entry.generation.first
            return len({step for generation, _, step in self.steps if generation == number}) > steps

        try:
            wait_for(is_so, seconds=60.0)
        except AssertionError:
            raise AssertionError(f"{names} never were: {self.entry}\n{self.said}") from None
        return self.entry.generation.number - self.entry.generation.first

    @property
    def steps(self) -> list[tuple[int, ...]]:
        file = self.folder / "steps"
        return [tuple(map(int, line.split())) for line in file.read_text().split("\n")[:-1]] if file.exists() else []

    @property
    def said(self) -> str:
        return "\n".join(f"--- {name}\n{run.stderr}" for name, run in self.runs.items())

    def check(self, *, planned: int) -> None:
        """In each generation all ranks did the same steps, the next began behind them or, after a loss, at a checkpoint.

        Args:
            planned: changes that must have lost nothing and repeated nothing.
        """
        by_generation: dict[int, dict[int, list[int]]] = {}
        for generation, rank, step in self.steps:
            by_generation.setdefault(generation, {}).setdefault(rank, []).append(step)
        seamless, last = 0, 0
        for _, ranks in sorted(by_generation.items()):
            first = min(steps[0] for steps in ranks.values())
            assert all(steps == list(range(first, steps[-1] + 1)) for steps in ranks.values())
            assert all(steps[0] == first for steps in ranks.values())
            assert first <= last + 1, "a step was left out"
            seamless += bool(last) and first == last + 1
            last = max(steps[-1] for steps in ranks.values())
        assert seamless >= planned, f"{seamless} of {planned} planned changes repeated no step: {by_generation.keys()}"

    def stop(self) -> list[dict[str, Any]]:
        """All at about the same time, as a scheduler does."""
        for run in self.runs.values():
            run.signal(signal.SIGTERM)
        return [run.wait(is_last=False) for run in self.runs.values()]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Nodes]]:
    made: list[Nodes] = []

    def one(*nodes: int, **conf: float) -> Nodes:
        made.append(Nodes(tmp_path, (nodes[0], nodes[1]), **conf))
        return made[-1]

    yield one
    for nodes in made:
        for run in nodes.runs.values():
            try:
                os.kill(run.pid, signal.SIGKILL)
                os.waitpid(run.pid, 0)
            except (ProcessLookupError, ChildProcessError):
                pass


@pytest.mark.slow
def test_nodes_join_and_leave_without_a_lost_step(make: Callable[..., Nodes]) -> None:
    """Two, a third one joins, a fourth stands by; one leaves by notice and the fourth steps in; then all stop at once."""
    nodes = make(2, 3)
    nodes.start("a", workers=2)
    nodes.start("b")
    nodes.wait("a", "b")
    nodes.start("c")
    nodes.wait("a", "b", "c")
    nodes.start("d")
    wait_for(lambda: "standing by" in nodes.runs["d"].stderr)
    assert nodes.id_of("d") not in nodes.entry.generation.reason
    leaving = nodes.runs.pop("a")
    leaving.signal(signal.SIGTERM)
    outcome = leaving.wait(is_last=False)
    assert (outcome["code"], outcome["reason"]) == (75, "preempt"), leaving.stderr
    assert "this node has left at step" in outcome["message"]
    number = nodes.wait("b", "c", "d")
    assert number == 2, "one leaves and one steps in: one change"
    nodes.check(planned=2)
    outcomes = nodes.stop()
    assert [outcome["code"] for outcome in outcomes] == [75] * 3, outcomes
    assert len({outcome["step"] for outcome in outcomes}) == 1
    assert (nodes.folder / "checkpoint").read_text() == str(outcomes[0]["step"])


@pytest.mark.slow
def test_who_steps_in_for_all_waits_for_the_last_that_saves_also_where_the_leader_has_ended_before(
    make: Callable[..., Nodes],
) -> None:
    nodes = make(1, 2, last_call_timeout=30.0)
    for name in "abc":
        nodes.start(name, job={"ending": {"1": 3.0}})
        wait_for(lambda: nodes.entry.leader is not None)
        nodes.wait("a", "b") if name == "b" else None
    wait_for(lambda: "standing by" in nodes.runs["c"].stderr)
    leader = nodes.leader
    leaving = [nodes.runs.pop(name) for name in "ab"]
    for run in leaving:
        run.signal(signal.SIGTERM)
    assert [run.wait(is_last=False)["code"] for run in leaving] == [75, 75], leaving[1].stderr
    number = nodes.wait("c")
    ends = [(nodes.folder / f"ended-0-{rank}").stat().st_mtime for rank in (0, 1)]
    assert leader == "a" and ends[1] - ends[0] > 2.0, "the leader has ended first"
    assert (nodes.folder / f"pid-{number}-0").stat().st_mtime > ends[1], "it has begun before all was saved"
    nodes.check(planned=1)
    assert nodes.stop()[0]["code"] == 75


@pytest.mark.slow
def test_nodes_die_in_every_way(make: Callable[..., Nodes], monkeypatch: pytest.MonkeyPatch) -> None:
    """A member, the leader, a worker; a stopped agent comes back; two at once; one that joins as another is lost; and one
    whose host is lost again and again."""
    monkeypatch.setattr(run_rendezvous, "PATIENCE", 0.2)  # they say it sooner that they wait
    nodes = make(1, 4, ttl=3.0, return_delay=600.0, max_return_delay=600.0)
    for name in "abc":
        nodes.start(name)
    nodes.wait("a", "b", "c")
    nodes.kill(next(name for name in nodes.runs if name != nodes.leader))
    nodes.wait(*nodes.runs)
    nodes.kill(nodes.leader)
    nodes.wait(*nodes.runs)
    nodes.start("d")
    nodes.start("e")
    before = nodes.wait(*nodes.runs)
    victim = next(iter(nodes.folder.glob(f"pid-{before}-1")))
    os.kill(int(victim.read_text()), signal.SIGKILL)
    wait_for(lambda: nodes.entry.generation.number - nodes.entry.generation.first > before, seconds=60.0)
    nodes.wait(*nodes.runs)
    stopped = nodes.leader
    nodes.runs[stopped].signal(signal.SIGSTOP)
    nodes.wait(*(name for name in nodes.runs if name != stopped))
    nodes.runs[stopped].signal(signal.SIGCONT)
    nodes.wait(*nodes.runs)
    nodes.start("f")
    for name in list(nodes.runs)[:2]:
        nodes.kill(name)
    nodes.wait(*nodes.runs)
    for name in "gh":  # the first return is at once
        nodes.start(name, address="127.0.0.7")
        nodes.wait(*nodes.runs)
        nodes.kill(name)
        nodes.wait(*nodes.runs)
    late = nodes.start("i", address="127.0.0.7")
    wait_for(lambda: "this host was lost 2 times in short: it is let in again at" in late.stderr)
    assert (
        nodes.entry.losses[-1] == Loss("127.0.0.7", 2, 600.0) and nodes.id_of("i") not in nodes.entry.generation.reason
    )
    nodes.check(planned=1)
    outcomes = nodes.stop()
    assert [outcome["code"] for outcome in outcomes] == [75, 75, 75], nodes.said
    assert nodes.said.count("(restart ") <= 1, "other nodes' deaths cost no budget"


@pytest.mark.slow
def test_too_few_nodes_save_and_wait_for_another(make: Callable[..., Nodes]) -> None:
    nodes = make(2, 2)
    nodes.start("a")
    nodes.start("b")
    nodes.wait("a", "b")
    leaving = nodes.runs.pop("a")
    leaving.signal(signal.SIGINT)
    outcome = leaving.wait(is_last=False)
    assert (outcome["code"], outcome["reason"]) == (75, "interrupt")
    wait_for(lambda: "waiting for nodes, of which at least 2 are needed" in nodes.runs["b"].stderr, seconds=60.0)
    assert nodes.entry.generation.is_paused
    assert (nodes.folder / "checkpoint").read_text() == str(outcome["step"])
    nodes.start("c")
    nodes.wait("b", "c")
    nodes.check(planned=1)
    assert [one["code"] for one in nodes.stop()] == [75, 75]


@pytest.mark.slow
def test_a_node_that_dies_below_the_minimum_costs_no_budget(make: Callable[..., Nodes]) -> None:
    """The other one waits for as long as it takes, and goes on with a new one."""
    nodes = make(2, 2, ttl=2.0)
    for name in "ab":
        nodes.start(name, max_restarts=0)
    nodes.wait("a", "b")
    nodes.kill("b")
    wait_for(lambda: "waiting for nodes, of which at least 2 are needed" in nodes.runs["a"].stderr, seconds=60.0)
    assert "standing by" not in nodes.runs["a"].stderr, "nobody trains"
    nodes.start("c", max_restarts=0)
    nodes.wait("a", "c")
    nodes.check(planned=0)
    assert [one["code"] for one in nodes.stop()] == [75, 75], nodes.said


@pytest.mark.slow
def test_the_end_is_the_end_for_all_until_the_command_is_given_again(make: Callable[..., Nodes]) -> None:
    nodes = make(2, 2)
    nodes.start("a", steps=50)
    nodes.start("b", steps=50)
    wait_for(lambda: nodes.entry.generation.number > 0)
    nodes.start("c", steps=50)  # stands by
    assert [run.wait(is_last=False)["code"] for run in nodes.runs.values()] == [0, 0, 0], nodes.said
    assert nodes.entry.closed == "finished"
    again = [nodes.start(name, steps=60) for name in "de"]
    assert [run.wait()["code"] for run in again] == [0, 0], nodes.said
    assert max(step for *_, step in nodes.steps) == 60


def test_a_node_that_fails_ends_the_other(make: Callable[..., Nodes]) -> None:
    nodes = make(2, 2)
    for name in "ab":
        nodes.start(name, events={"0/1": [9, "exception"]}, max_restarts=0)
    outcomes = [run.wait(is_last=False) for run in nodes.runs.values()]
    assert [outcome["code"] for outcome in outcomes] == [1, 1]
    shown = [
        outcome["report"]["message"] for outcome in outcomes if outcome["report"] and not outcome["report"]["lost_peer"]
    ]
    assert shown == ["bad sample on rank 1"]
    assert any("another node has ended the run: worker rank 1" in outcome["message"] for outcome in outcomes)


def test_a_second_interrupt_of_one_node_kills_it_and_the_other_goes_on(make: Callable[..., Nodes]) -> None:
    nodes = make(1, 2, last_call_timeout=30.0)
    nodes.start("a", events={"0/0": [20, "hang"], "0/1": [20, "hang"]})
    nodes.start("b", events={"0/0": [20, "hang"], "0/1": [20, "hang"]})
    nodes.wait("a", "b")
    killed = nodes.runs.pop("a")
    killed.signal(signal.SIGINT)
    wait_for(lambda: "stopping" in killed.stderr)
    time.sleep(0.4)
    killed.signal(signal.SIGINT)
    assert killed.wait(is_last=False)["code"] == 130
    nodes.wait("b")
    assert nodes.stop()[0]["code"] == 75
