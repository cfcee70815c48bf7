"""Snapshots at their limits: starts that die early, links and keepers that cannot be had for a while, what goes first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from elastictrain.channel import GoneError, Message
from elastictrain.checkpoint import DamagedError
from elastictrain.checkpoint import memory as memories
from elastictrain.checkpoint.memory import Memory
from elastictrain.checkpoint.ranks import Ranks, RoundFailed
from elastictrain.checkpoint.snapshots import Identity, Snapshots, _Kept, _State
from tests.checkpoint.nodes import KEY, RUN, Node, meet, snapshot, taking, wait_until
from tests.checkpoint.states import blank, expected
from tests.helpers import run_ranks

pytestmark = pytest.mark.slow  # each starts processes


def wait_for(node: Node, step: int) -> None:
    """Its image is whole."""
    wait_until(lambda: step in node.steps())


@pytest.fixture
def node() -> Iterator[Node]:
    made = Node()
    yield made
    made.end()


def test_starts_that_die_early_leave_no_more_and_more(node: Node, tmp_path: Path) -> None:
    """Each dies after its first snapshot, of which nobody knew that it was whole; all have gone on from the same one."""
    base = None
    for start in range(1, 6):
        checkpoints = taking(str(tmp_path), node.address, start=start, base=base)
        snapshot(checkpoints, 10 * start, {"w": torch.zeros(100)})
        wait_for(node, 10 * start)
        base = base or node.held()[0]["about"]["snapshot"]
        checkpoints.close()
        assert node.steps() == ([10, 10 * start] if start > 1 else [10])


def test_the_newest_whole_one_is_filled_anew_last_even_where_nothing_can_be_copied() -> None:
    class Link:
        is_open, address = True, {"host": "here", "port": 1}

        def try_to_send(self, head: dict[str, Any]) -> None:
            pass

    taken = Snapshots(Link(), Ranks(0, 1), Identity(RUN, "a job", 1))  # type: ignore[arg-type]
    parts = [({"host": host, "port": 1}, list[Any]()) for host in ("here", "there")]
    for _ in range(3):  # three are staged, the first one was hashed, and its copy has failed on both nodes
        for _, states in parts:
            states[:] = [_State(one.snapshot, one.is_whole, one.is_copied, one.is_uncopied) for one in taken._kept]
        order = taken.decide(parts)  # type: ignore[arg-type]
        assert order is not None
        is_first = not taken._kept
        taken._kept.append(_Kept(order.snapshot, 10, None, is_whole=is_first, is_uncopied=True))  # type: ignore[arg-type]
    first, _, third = (one.snapshot for one in taken._kept)
    for _, states in parts:
        states[:] = [_State(one.snapshot, one.is_whole, one.is_copied, one.is_uncopied) for one in taken._kept]
    order = taken.decide(parts)  # type: ignore[arg-type]
    assert order is not None and not order.durable
    taken.make_room(order)
    assert [one.snapshot for one in taken._kept] == [first, third]


def test_nothing_is_waited_for_once_the_generation_is_over() -> None:
    """A buddy that is stopped would hold this worker up for longer than its agent waits."""

    class Link:
        is_open = True

        def hear(self) -> list[Any]:
            looks.append(0)
            return []

        def wait(self, seconds: float) -> None:
            assert seconds < 1.0

    looks = list[int]()
    taken = Snapshots(
        Link(),  # type: ignore[arg-type]
        Ranks(0, 1),
        Identity(RUN, "a job", 1),
        is_over=lambda: len(looks) > 3,
    )
    taken._kept.append(_Kept("one", 10, None, is_whole=True, copies=True, has_buddy=True))  # type: ignore[arg-type]
    assert not taken.settle(seconds=600.0)
    assert len(looks) == 4


def test_a_buddy_that_could_not_be_told_is_told_later() -> None:
    class Link:
        is_open, address = False, {"host": "here", "port": 1}

        def try_to_send(self, head: dict[str, Any]) -> None:
            if self.is_open:
                said.append((head["kind"], head["host"]))

    said, link = list[Any](), Link()
    taken = Snapshots(link, Ranks(0, 1), Identity(RUN, "a job", 1))  # type: ignore[arg-type]
    parts = [({"host": host, "port": 1}, list[Any]()) for host in ("here", "there")]
    for is_open in (False, True, True):
        link.is_open = is_open
        order = taken.decide(parts)  # type: ignore[arg-type]
        assert order is not None and (order.ring is None) == is_open
        taken.make_room(order)
    assert said == [("buddy", "there")]


def test_what_cannot_be_had_now_is_not_thrown_away(node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = taking(str(tmp_path), node.address)
    snapshot(checkpoints, 10, expected())
    wait_for(node, 10)
    memory, found = meet(node.address)
    reader, targets = memory.open(found[0]), blank(expected())
    memory.hang_up()
    assert memory.link is not None
    memory.link.close()  # else there is no need to connect
    with monkeypatch.context() as patch:
        patch.setattr(memories, "connect_local", Mock(side_effect=ConnectionRefusedError("not now")))
        for read in (lambda: reader.load(targets), lambda: memory.open(found[0])):
            with pytest.raises(DamagedError, match="rank 0's image: not now"):
                read()
    memory.reject(found[0])
    assert node.steps() == [10]
    answers = [GoneError("too many connections"), ConnectionResetError(), node.connect()]
    monkeypatch.setattr(memories, "connect_local", Mock(side_effect=answers))
    memory.open(found[0])


def test_one_connection_to_other_nodes_at_a_time(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    memory, _ = meet(node.address)
    memory._meeting = replace(memory._meeting, keepers=(node.address,) * 4)
    made = list[Mock]()

    def connect(*_: Any) -> Mock:
        made.append(channel := Mock())
        channel.receive.return_value = Message({"is": "there"}, memoryview(b""))
        return channel

    monkeypatch.setattr(memories, "connect", connect)
    for keeper in (1, 2, 2, 3):
        memory.request(memories.Holder(keeper, 0, ""), {})
    assert [channel.close.call_count for channel in made] == [1, 1, 0]


def test_a_lost_link_to_a_keeper_that_lives_costs_nothing(node: Node, tmp_path: Path) -> None:
    """What the keeper holds goes on being known, so that the newest of them is not filled anew."""
    checkpoints = taking(str(tmp_path), node.address)
    taken, state = checkpoints.snapshots, {"w": torch.zeros(100)}
    assert taken is not None
    for step in (10, 20, 30):
        snapshot(checkpoints, step, state)
        wait_for(node, step)
        taken._link.close()
    taken.reached = lambda point: held.append(node.steps())  # type: ignore[method-assign]
    held = list[list[int]]()
    snapshot(checkpoints, 40, state)
    assert held[-1][:2] == [20, 30] and all(30 in steps for steps in held)
    wait_for(node, 40)
    assert node.steps() == [20, 30, 40] and taken.num_failed == 0


def test_one_rank_that_cannot_meet_means_that_none_has(node: Node) -> None:
    """Whether snapshots are taken is decided by all ranks alike: taking one is a collective."""

    def try_to_meet(rank: int, world_size: int) -> bool:
        dist.init_process_group("gloo")

        def key() -> bytes:
            if rank == 1:
                raise OSError("no token here")
            return KEY

        memory = Memory(Ranks(rank, world_size), first=rank == 0, ask=lambda key: True, find=lambda _: node.address)
        with pytest.raises(RoundFailed, match="rank 1: no token here"):
            memory.meet(key, lambda abouts: [True] * len(abouts))
        return memory.link is not None

    assert run_ranks(try_to_meet, 2) == [False, False]
