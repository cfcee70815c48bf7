"""Stock torchrun with ``--rdzv-backend=elastictrain``: real agents, killed ones too."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousTimeoutError,
)

from elastictrain.channel import key_of
from elastictrain.checkpoint.token import read_token
from elastictrain.elastic import run_rendezvous as rendezvous_module
from elastictrain.elastic.chain import Member
from elastictrain.elastic.endpoint import host_and_port
from elastictrain.elastic.handler import BACKEND, create
from elastictrain.elastic.links import listen
from elastictrain.elastic.run_rendezvous import RunRendezvous
from elastictrain.elastic.runlog import RunLog
from elastictrain.errors import UsageError
from elastictrain.rundir import RunDir
from tests.elastic.fleet import ROOT, wait_for
from tests.helpers import free_port

WORKER = ROOT / "tests" / "elastic" / "rendezvous_worker.py"
PATIENT = {"ttl": 15.0, "last_call_timeout": 0.1}


def parameters(endpoint: str, *, nodes: tuple[int, int] = (1, 4), **more: Any) -> RendezvousParameters:
    return RendezvousParameters(BACKEND, endpoint, "job", *nodes, local_addr="127.0.0.1", **{**PATIENT, **more})


def all_next(handlers: list[RunRendezvous]) -> list[RendezvousInfo]:
    done: list[Any] = [None] * len(handlers)

    def go(index: int) -> None:
        try:
            done[index] = handlers[index].next_rendezvous()
        except Exception as error:
            done[index] = error

    threads = [threading.Thread(target=go, args=(index,)) for index in range(len(handlers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    for one in done:
        assert isinstance(one, RendezvousInfo), one
    return done


@pytest.fixture
def handlers(tmp_path: Path) -> Iterator[list[RunRendezvous]]:
    made = [create(parameters(str(tmp_path), nodes=(3, 4))) for _ in range(3)]
    yield made
    for handler in made:
        handler._node.stop()


def test_ranks_and_a_store_for_all(handlers: list[RunRendezvous]) -> None:
    infos = all_next(handlers)
    assert sorted(info.rank for info in infos) == [0, 1, 2]
    assert {info.world_size for info in infos} == {3}
    assert len({str(info.bootstrap_store_info) for info in infos}) == 1
    assert [handler.rank for handler in handlers] == [info.rank for info in infos]
    assert [member.node for member in handlers[0].members] == [
        handler._node.me.node for handler in sorted(handlers, key=lambda one: one.rank)
    ]
    infos[0].store.set("word", "given")
    assert [info.store.get("word") for info in infos] == [b"given"] * 3
    assert [handler.num_nodes_waiting() for handler in handlers] == [0, 0, 0]
    assert not any(handler.is_closed() for handler in handlers)


def test_failed_workers_of_one_node_bring_all_into_a_new_generation(handlers: list[RunRendezvous]) -> None:
    first = all_next(handlers)
    threads = threading.Thread(target=handlers[1].next_rendezvous)
    threads.start()
    wait_for(lambda: handlers[0].num_nodes_waiting() and handlers[2].num_nodes_waiting())
    again = all_next([handlers[0], handlers[2]])
    threads.join(60)
    assert [info.rank for info in again] == [first[0].rank, first[2].rank]
    first[0].store.set("word", "old")
    assert not again[0].store.check(["word"]), "the generations share a store"


def test_one_that_leaves_closes_nothing_for_the_others(tmp_path: Path) -> None:
    """As reported in pytorch#67742, pytorch#150916: SIGTERM to one agent closed the rendezvous for all."""
    # They begin when the second is there, and not before: with two it is full.
    made = [create(parameters(str(tmp_path), nodes=(1, 2), last_call_timeout=60.0)) for _ in range(2)]
    try:
        assert {info.world_size for info in all_next(made)} == {2}
        assert made[0].shutdown()
        wait_for(lambda: made[1].num_nodes_waiting() == 1)
        assert not made[1].is_closed()
        assert made[1].next_rendezvous().world_size == 1
        assert made[1].shutdown()
    finally:
        for handler in made:
            handler._node.stop()


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_first_member_that_does_not_answer_is_left_alone_once_there_is_a_newer_generation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_stopped: bool
) -> None:
    """A dead one refuses, and torch tries again; for a stopped one the kernel still takes connections."""
    has_tried = threading.Event()

    def store(*arguments: Any, **named: Any) -> TCPStore:
        has_tried.set()
        return TCPStore(*arguments, **named)

    monkeypatch.setattr(rendezvous_module, "STORE_TIMEOUT", timedelta(seconds=600))
    handler, silent = create(parameters(str(tmp_path))), listen("127.0.0.1")
    try:
        assert handler.next_rendezvous().world_size == 1
        monkeypatch.setattr(rendezvous_module, "TCPStore", store)
        node, now = handler._node, handler._node.generation
        port = silent.getsockname()[1] if is_stopped else free_port()
        dead = Member("dead", "127.0.0.1", free_port(), port)
        with_dead = replace(now, number=now.number + 1, members=(dead, node.me))
        node._notify(generation=with_dead)
        met: list[Any] = []
        meeting = threading.Thread(
            target=lambda: met.append(handler._meet(with_dead, time.monotonic() + 600)), daemon=True
        )
        meeting.start()
        assert has_tried.wait(60)
        node._notify(generation=replace(now, number=now.number + 2))
        meeting.join(60)
        assert met == [None]
    finally:
        silent.close()
        handler._node.stop()


def test_nodes_meet_before_their_workers_have_stopped(tmp_path: Path) -> None:
    """Once a generation is agreed on, so that nobody waits for it while nobody trains."""
    made = [create(parameters(str(tmp_path), nodes=(2, 2)), num_workers=1, has_steps=True) for _ in range(2)]
    try:
        assert {info.world_size for info in all_next(made)} == {2}
        after = replace(made[0]._current, number=made[0]._current.number + 1, boundary=9)
        for handler in made:
            handler._formed(after)
        begun = [handler._meeting for handler in made if handler._meeting is not None]
        for meeting in begun:
            meeting.join(60)
        met = [handler._meet(after, time.monotonic() + 60) for handler in made]
        assert met == [meeting.info for meeting in begun]
        again = made[1]._meet(after, time.monotonic() + 60)  # a second question has the same answer
        assert len({one.bootstrap_store_info.master_port for one in [*met, again] if one is not None}) == 1
        assert None not in [*met, again]
    finally:
        for handler in made:
            handler._node.stop()


def test_a_leaving_node_does_not_wait_for_one_that_is_lost(tmp_path: Path) -> None:
    """Its workers would wait for the lost one's, until they are killed."""
    handler = create(parameters(str(tmp_path), nodes=(1, 1)), num_workers=1, has_steps=True)
    try:
        handler.next_rendezvous()
        me, b, c = handler._node.me, Member("b", "127.0.0.1"), Member("c", "127.0.0.1")
        now = replace(handler._current, members=(me, b, c))
        handler._current, handler._agreed = now, replace(now, number=now.number + 1, members=(b, c), boundary=9)
        handler._node.generation = handler._agreed
        assert not handler.is_superseded, "it finishes the steps that are agreed on"
        handler._node.generation = replace(now, number=now.number + 2, members=(b, c, Member("d", "127.0.0.1")))
        assert not handler.is_superseded, "nobody whom it needs is gone"
        handler._node.generation = replace(now, number=now.number + 2, members=(b,))
        assert handler.is_superseded and handler.is_out
    finally:
        handler._node.stop()


def test_a_node_that_is_gone_before_it_has_handed_over_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A leaving machine that freezes closes no connection: its peers would wait at the agreed step until they are killed."""
    made = [create(parameters(str(tmp_path), nodes=(1, 2), last_call_timeout=60.0), has_steps=True) for _ in range(2)]
    try:
        all_next(made)
        stays, leaves = sorted(made, key=lambda one: one._node._peer.leading is None)
        leaves.notice()
        wait_for(lambda: stays.asked is not None and leaves.asked is not None)
        for one in made:
            assert one.asked is not None
            one.promise(one.asked, is_kept=True, step=0)
        wait_for(lambda: stays.agreed is not None)
        monkeypatch.setattr(rendezvous_module, "GONE_SECONDS", 600.0)
        leaves._node.stop()
        wait_for(lambda: leaves._node.me.node in stays._node.gone)
        assert not stays.is_superseded, "its workers may just be done, and so may these in a moment"
        monkeypatch.setattr(rendezvous_module, "GONE_SECONDS", -1.0)
        assert stays.is_superseded and not stays.is_out
        agreed_at, stays._agreed_at = stays._agreed_at, time.monotonic()
        assert not stays.is_superseded, "what was before they agreed says nothing of this change"
        stays._agreed_at = agreed_at
        assert stays.next_rendezvous().world_size == 1
        assert not stays.is_superseded
    finally:
        for one in made:
            one._node.stop()


def test_a_node_that_has_stood_by_for_longer_than_it_would_wait_for_a_first_one_steps_in(tmp_path: Path) -> None:
    made = [
        create(parameters(str(tmp_path), nodes=(1, 1), join_timeout=1.0), num_workers=1, has_steps=True)
        for _ in range(2)
    ]
    stepped_in: list[RendezvousInfo] = []
    try:
        made[0].next_rendezvous()
        waiting = threading.Thread(target=lambda: stepped_in.append(made[1].next_rendezvous()), daemon=True)
        waiting.start()
        wait_for(lambda: "standing by" in made[1]._told)
        waiting.join(1.5)
        assert waiting.is_alive()
        made[0].shutdown()  # it has workers with steps: to the others it is lost
        waiting.join(60)
        assert [info.world_size for info in stepped_in] == [1]
        assert made[1]._current.number == made[0]._current.number + 1, "it has asked for no other one"
        assert made[0].stood_by is None
        assert made[1].stood_by is not None and made[1].began <= made[1].stood_by < made[1].formed - 1.0
    finally:
        for handler in made:
            handler._node.stop()


@pytest.mark.parametrize("least", [1, 2])
def test_who_is_lost_is_known_and_whether_the_others_had_to_wait_for_more(least: int, tmp_path: Path) -> None:
    def make() -> RunRendezvous:
        more = {"num_workers": 1, "has_steps": True}
        return create(parameters(str(tmp_path), nodes=(least, 2), last_call_timeout=60.0), **more)

    made = [make(), make()]
    try:
        all_next(made)
        assert all(one.stood_by is None and not one.lost for one in made)
        made.pop()._node.stop()
        if least == 2:  # too few are left
            made.append(make())
        infos = all_next(made)
        assert [info.world_size for info in infos] == [least] * least
        assert made[0].lost == ((socket.gethostname(), os.getpid()),) and not made[-1].is_planned
        assert made[0].stood_by == (made[0].began if least == 2 else None)
    finally:
        for handler in made:
            handler._node.stop()


@pytest.mark.parametrize("is_one_lost", [False, True])
def test_those_that_waited_since_one_has_left_take_it_for_no_failure(is_one_lost: bool, tmp_path: Path) -> None:
    """Of three nodes, all of which are needed, one leaves; in one case another one is lost as they wait."""
    more = {"num_workers": 1, "has_steps": True}

    def make() -> RunRendezvous:
        return create(parameters(str(tmp_path), nodes=(3, 3), last_call_timeout=60.0), **more)

    made = [make() for _ in range(3)]
    try:
        all_next(made)
        stays, other, leaves = sorted(made, key=lambda one: one._node._peer.leading is None)
        leaves.notice()
        wait_for(lambda: all(one.asked is not None for one in made))
        for one in made:
            assert one.asked is not None
            one.promise(one.asked, is_kept=True, step=0)
        wait_for(lambda: all(one.agreed is not None and one.agreed.is_paused for one in (stays, other)))
        leaves._node.stop()
        if is_one_lost:
            other._node.stop()
        waiting = [stays] if is_one_lost else [stays, other]
        made += [make() for _ in range(3 - len(waiting))]
        infos = all_next([*waiting, *made[3:]])
        assert [info.world_size for info in infos] == [3, 3, 3]
        assert [one.is_planned for one in waiting] == [not is_one_lost] * len(waiting)
        assert len(stays.lost) == is_one_lost, "the one that has left is not lost"
        assert stays.stood_by is not None
    finally:
        for one in made:
            one._node.stop()


def test_a_newcomer_to_a_paused_run_waits_for_as_long_as_the_others_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous_module, "PATIENCE", 0.2)

    def one(**more: Any) -> RunRendezvous:
        made.append(create(parameters(str(tmp_path), nodes=(3, 3), **more), num_workers=1, has_steps=True))
        return made[-1]

    def wait(handler: RunRendezvous) -> threading.Thread:
        thread = threading.Thread(target=lambda: done.append(handler.next_rendezvous()), daemon=True)
        thread.start()
        return thread

    made: list[RunRendezvous] = []
    done: list[RendezvousInfo] = []
    try:
        all_next([one(), one(), one()])
        made[1].shutdown()
        made[2].shutdown()  # they have workers with steps: to the others they are lost
        waiting = [wait(made[0]), wait(newcomer := one(join_timeout=1.0))]
        wait_for(lambda: "the run is paused until then, and this node waits with the others" in newcomer._told)
        waiting[1].join(1.5)
        assert waiting[1].is_alive(), "it has given up"
        waiting.append(wait(one()))
        for thread in waiting:
            thread.join(60)
        assert [info.world_size for info in done] == [3, 3, 3]
    finally:
        for handler in made:
            handler._node.stop()


def test_too_few_nodes_is_a_timeout_and_a_closed_run_is_said(tmp_path: Path) -> None:
    handler = create(parameters(str(tmp_path), nodes=(2, 2), join_timeout=0.2))
    try:
        with pytest.raises(RendezvousTimeoutError):
            handler.next_rendezvous()
        handler.set_closed()
        wait_for(handler.is_closed)
        with pytest.raises(RendezvousClosedError):
            handler.next_rendezvous()
    finally:
        handler._node.stop()


def test_a_host_and_port_is_led_by_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    monkeypatch.delenv("ELASTICTRAIN_TOKEN", raising=False)
    with pytest.raises(UsageError, match="ELASTICTRAIN_TOKEN"):
        create(parameters(endpoint))
    monkeypatch.setenv("ELASTICTRAIN_TOKEN", "a secret of all the nodes")
    made = [create(parameters(endpoint, nodes=(2, 2))) for _ in range(2)]
    try:
        assert {info.world_size for info in all_next(made)} == {2}
    finally:
        for handler in made:
            handler._node.stop()


def test_what_an_endpoint_may_be() -> None:
    assert host_and_port("node7:1234") == ("node7", 1234)
    assert host_and_port("node7") == ("node7", 29400)
    assert host_and_port("[::1]:80") == ("::1", 80)
    for folder in ("/shared/run", "s3://bucket/run", "runs/a", "./run", "."):
        assert host_and_port(folder) is None
    for endpoint, complaint in [("", "is empty"), ("memory://run", "do not see it")]:
        with pytest.raises((UsageError, ValueError), match=complaint):
            create(parameters(endpoint))


def test_options_that_cannot_be(tmp_path: Path) -> None:
    for more, complaint in [({"ttl": "soon"}, "give seconds"), ({"ttl": "0.3"}, "speak twice")]:
        with pytest.raises(UsageError, match=complaint):
            create(parameters(str(tmp_path), **more))


# ---- torchrun ---------------------------------------------------------------------------------------------------------


class Agents:
    """torchrun processes on addresses of their own."""

    def __init__(self, tmp_path: Path) -> None:
        self.run_dir, self.out = tmp_path / "run", tmp_path / "out"
        self.out.mkdir()
        # What pyproject.toml registers, whether or not it is what is installed.
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        meta = tmp_path / "meta" / "registered-0.dist-info"
        meta.mkdir(parents=True)
        (meta / "METADATA").write_text("Metadata-Version: 2.1\nName: registered\nVersion: 0\n")
        points = project["entry-points"]["torchrun.handlers"]
        (meta / "entry_points.txt").write_text(
            "[torchrun.handlers]\n" + "".join(f"{name} = {target}\n" for name, target in points.items())
        )
        self.env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{meta.parent}", "OMP_NUM_THREADS": "1"}
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, address: str, *, nodes: str = "2:3") -> None:
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes", nodes, "--nproc-per-node", "1",
            "--rdzv-backend", "elastictrain", "--rdzv-endpoint", str(self.run_dir), "--local-addr", address,
            "--rdzv-conf", "ttl=20,last_call_timeout=30", "--monitor-interval", "0.1", str(WORKER), str(self.out),
        ]  # fmt: skip
        with open(self.out.parent / f"{address}.txt", "wb") as file:
            self.running[address] = subprocess.Popen(
                command, stdout=file, stderr=file, env=self.env, cwd=ROOT, start_new_session=True
            )

    def kill(self, address: str) -> None:
        """The whole node."""
        agent = self.running.pop(address)
        workers = [line["pid"] for line in self.lines() if line["agent"] == agent.pid]
        for pid in [agent.pid, *workers]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        agent.wait()

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(path.read_text()) for path in self.out.glob("*.json")]

    def are(self, world: int, *, number: int) -> bool:
        """So many of this size have met, of agents that are alive."""
        agents = {agent.pid for agent in self.running.values()}
        them = [line for line in self.lines() if line["world"] == world and line["agent"] in agents]
        assert all(line["sum"] == world * (world + 1) / 2 for line in them)
        return len({line["rank"] for line in them}) == world and len(them) >= number

    def leader(self) -> str:
        key = key_of(read_token(RunDir(self.run_dir)))
        leader = RunLog(RunDir(self.run_dir), key).newest().leader
        assert leader is not None
        return leader.host

    def said(self) -> str:
        return "\n".join(path.read_text()[-3000:] for path in sorted(self.out.parent.glob("*.txt")))


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Agents]:
    made = Agents(tmp_path)
    yield made
    for address in list(made.running):
        made.kill(address)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_torchrun_goes_on_when_the_node_of_the_rendezvous_dies(agents: Agents) -> None:
    """The master node dies, a worker dies, another node joins; and the end is the end for all.

    As reported in pytorch#168242: the master node died, and the job with it.
    """
    try:
        for number in (2, 3, 4):
            agents.start(f"127.0.0.{number}")
        wait_for(lambda: agents.are(3, number=3), seconds=150)
        agents.kill(agents.leader())
        wait_for(lambda: agents.are(2, number=2), seconds=150)
        agents.start("127.0.0.5")
        wait_for(lambda: agents.are(3, number=5), seconds=150)
        (agents.out / "stop").touch()
        for agent in agents.running.values():
            assert agent.wait(timeout=100) == 0
    except BaseException:
        print(agents.said())
        raise
