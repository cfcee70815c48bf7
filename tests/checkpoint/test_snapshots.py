"""Snapshots in real keepers: which are held, what is read back in any layout, and what a death costs."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from elastictrain.checkpoint import CheckpointManager, CheckpointReader, DamagedError
from elastictrain.checkpoint import copies as copies_module
from elastictrain.checkpoint import manager as manager_module
from elastictrain.checkpoint import memory as memory_module
from elastictrain.checkpoint.arena import Arena
from elastictrain.checkpoint.found import Holder
from elastictrain.checkpoint.held import MAX_EARLIER, MAX_OWN
from elastictrain.checkpoint.memory import Memory
from elastictrain.checkpoint.snapshots import MANY
from tests.checkpoint.nodes import Node, meet, memory_of, snapshot, taking, wait_until
from tests.checkpoint.states import assert_equal, blank, expected, manager, spread
from tests.helpers import run_ranks
from tests.processes import is_running

pytestmark = pytest.mark.slow  # each starts processes


@pytest.fixture
def node() -> Iterator[Node]:
    made = Node()
    yield made
    made.end()


@pytest.fixture
def two_nodes() -> Iterator[list[Node]]:
    made = [Node(), Node()]
    yield made
    for one in made:
        one.end()


# ---- any layout, any death ------------------------------------------------------------------------------------------


def _take(rank: int, world_size: int, url: str, addresses: list[Any]) -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (world_size,))
    first = rank == 0 or addresses[rank] != addresses[rank - 1]
    checkpoints = taking(url, addresses[rank], rank=rank, world_size=world_size, first=first)
    for step in (10, 20, 30):
        state = spread(expected(seed=step), mesh, [Shard(0)])
        snapshot(checkpoints, step, state, local_values={f"data.{rank}": rank})
        dist.barrier()
    dist.barrier()
    os._exit(0) if rank else None  # as if killed; rank 0 in good order


def _restore(rank: int, world_size: int, addresses: list[Any], seed: int) -> list[int]:
    mesh = None
    if world_size > 1:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (world_size,))
    first = rank == 0 or addresses[rank] != addresses[rank - 1]
    memory, found = meet(addresses[rank], rank=rank, world_size=world_size, first=first)
    reader = memory.open(next(one for one in found if one.step == seed))
    targets = blank(spread(expected(), mesh, [Shard(0)]))
    reader.load(targets)
    wanted = spread(expected(seed=seed), mesh, [Shard(0)])
    for name, target in targets.items():
        pair = [one.to_local() if hasattr(one, "to_local") else one for one in (target, wanted[name])]
        assert torch.equal(*pair), name
    assert reader.values == {"trainer.step": seed, "data.0": 0, "data.1": 1}
    assert memory.num_keepers == len({one["socket"] for one in addresses})
    return [one.step for one in found]


def _take_all(url: str, addresses: list[Any]) -> None:
    def take(rank: int, world_size: int) -> None:
        _take(rank, world_size, url, addresses)

    with pytest.raises(AssertionError, match="died without a word, exit code 0"):
        run_ranks(take, 2, timeout=120)


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_snapshot_is_restored_by_any_number_of_ranks(world_size: int, node: Node, tmp_path: Path) -> None:
    """As reported in torchtitan#811: another number of ranks failed, or lost the loader's state."""
    _take_all(str(tmp_path), [node.address] * 2)
    wait_until(lambda: node.steps(rank=0)[-1:] == node.steps(rank=1)[-1:] == [30])
    steps = run_ranks(_restore, world_size, [node.address] * world_size, 30, timeout=120)
    assert steps == [[30, 20, 10]] * world_size


def test_a_node_that_dies_with_its_keeper_costs_nothing(two_nodes: list[Node], tmp_path: Path) -> None:
    """Everything is at the other node: what its ranks gave it, and copies of the dead one's."""
    one, other = two_nodes
    _take_all(str(tmp_path), [one.address, other.address])
    wait_until(lambda: one.steps(rank=1, is_copy=True) and other.steps(rank=0, is_copy=True))
    copied = one.steps(rank=1, is_copy=True)[-1]
    _find_what_is_elsewhere(other, step=other.steps(rank=0, is_copy=True)[-1])
    other.kill()
    again = Node(other.name)  # a new keeper, which holds nothing
    try:
        assert copied in run_ranks(_restore, 1, [one.address], copied, timeout=120)[0]
        assert copied in run_ranks(_restore, 3, [one.address, one.address, again.address], copied, timeout=120)[2]
    finally:
        again.end()


def _find_what_is_elsewhere(node: Node, *, step: int) -> None:
    """A start on this node alone, which is left with copies of another one's: that one stands by, with its own images."""
    channel = node.connect()
    for held in node.held():
        if not held["is_copy"]:
            channel.send({"kind": "drop", "id": held["about"]["snapshot"], "rank": held["about"]["rank"]})
    wait_until(lambda: not node.steps(rank=1))
    channel.close()
    memory, found = meet(node.address)
    wanted = next(one for one in found if one.step == step)
    targets = blank(expected())
    memory.open(wanted).load(targets)
    assert_equal(targets, expected(seed=step))
    assert memory.num_keepers == 2
    memory.hang_up()
    assert meet(node.address, newer_than=step)[1] == [], "what storage has as well is not looked for"


# ---- what is held ---------------------------------------------------------------------------------------------------


def _wait_whole(checkpoints: CheckpointManager, node: Node, step: int) -> None:
    wait_until(lambda: step in node.steps())


def test_the_memory_is_bounded_over_many_snapshots(two_nodes: list[Node], tmp_path: Path) -> None:
    def take(rank: int, world_size: int) -> list[tuple[int, int]]:
        dist.init_process_group("gloo")
        inherited = memory_of("self")  # what other tests of this process have left
        checkpoints = taking(str(tmp_path), two_nodes[rank].address, rank=rank, world_size=world_size)
        used = []
        for step in range(1, 41):
            snapshot(checkpoints, step, {f"w{rank}": torch.full((1 << 18,), float(step)), "v": torch.zeros(1 << 18)})
            if step % 10 == 0:
                dist.barrier()
                used.append((memory_of("self") - inherited, memory_of(two_nodes[rank].pid)))
                dist.barrier()
        assert checkpoints.snapshots is not None
        assert checkpoints.snapshots.num_taken == 40 and checkpoints.snapshots.num_failed == 0
        return used

    image = (2 << 20) + (1 << 12)  # the larger rank's, at most
    for used in run_ranks(take, 2, timeout=120):
        assert all(own <= 3 * image and keeper <= 5 * image for own, keeper in used), used
    for node in two_nodes:
        wait_until(lambda node=node: memory_of(node.pid) <= 4 * image)  # type: ignore[misc]


def test_a_later_start_replaces_what_the_one_before_has_left(node: Node, tmp_path: Path) -> None:
    state, image = {"w": torch.zeros(1 << 18)}, (1 << 20) + (1 << 13)
    for start in (1, 2):
        base = next((one["about"]["snapshot"] for one in node.held() if one["about"]["step"] == 31), None)
        checkpoints = taking(str(tmp_path), node.address, start=start, base=base)
        for step in (10, 20, 30):
            snapshot(checkpoints, step + start, state)
            _wait_whole(checkpoints, node, step + start)
            assert memory_of(node.pid) <= (MAX_OWN + MAX_EARLIER) * image
        checkpoints.close()
        assert node.steps() == [10 + start, 20 + start, 30 + start]
    wait_until(lambda: memory_of(node.pid) < 4 << 20)


def test_half_a_snapshot_is_none(node: Node, tmp_path: Path) -> None:
    """A worker that dies while it stages: its memory held an older snapshot, and now holds none."""
    checkpoints = taking(str(tmp_path), node.address)
    assert checkpoints.snapshots is not None
    state = {"w": torch.zeros(1 << 18)}
    for step in (10, 20, 30):
        snapshot(checkpoints, step, state)
        _wait_whole(checkpoints, node, step)
    assert node.steps() == [10, 20, 30]

    def reached(point: str) -> None:
        if point == "staged":  # all but the last word has been written
            raise KeyboardInterrupt

    checkpoints.snapshots.reached = reached  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        snapshot(checkpoints, 40, state)
    assert node.steps() == [20, 30]


def test_a_snapshot_and_a_save_of_one_step_are_staged_once(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    staged = []
    stage = Arena.stage
    monkeypatch.setattr(Arena, "stage", lambda arena, resolve: (staged.append(arena.number), stage(arena, resolve)))
    checkpoints = taking(str(tmp_path), node.address)
    weights = torch.zeros(1 << 18)
    for step in range(1, 7):
        weights.fill_(step)
        checkpoints.begin(step, {"w": weights}, saves=step % 2 == 0, snapshots=True)
        _wait_whole(checkpoints, node, step)
    weights.fill_(-1)
    checkpoints.wait()
    assert len(staged) == 6 and len(set(staged)) <= 5
    targets = {"w": torch.zeros(1 << 18)}
    for step in (2, 4, 6):
        path = next((tmp_path / "checkpoints" / f"step-{step:08d}").iterdir())
        CheckpointReader(path).load(targets)
        assert targets["w"].unique().tolist() == [step]
    memory, found = meet(node.address)
    memory.open(found[0]).load(targets)
    assert targets["w"].unique().tolist() == [6]


# ---- damage ---------------------------------------------------------------------------------------------------------


def test_damage_in_memory_is_found_and_the_one_before_is_good(node: Node, tmp_path: Path) -> None:
    checkpoints = taking(str(tmp_path), node.address)
    for step in (10, 20):
        snapshot(checkpoints, step, expected(seed=step))
        _wait_whole(checkpoints, node, step)
    newest = checkpoints._staging._arenas[-1]
    place = next(one.start for one in newest.image.pieces if one.name == "model.weight")
    newest._map[place] ^= 1
    memory, found = meet(node.address)
    assert [one.step for one in found] == [20, 10]
    targets = blank(expected())
    with pytest.raises(DamagedError, match="^the snapshot of step 20 in memory is damaged: rank 0's image: .* hash"):
        memory.open(found[0]).load(targets)
    assert_equal(targets, blank(expected()))
    memory.reject(found[0])
    wait_until(lambda: node.steps() == [10])
    memory.open(found[1]).load(targets)
    assert_equal(targets, expected(seed=10))


def test_one_damaged_image_has_a_good_copy(two_nodes: list[Node], tmp_path: Path) -> None:
    def take(rank: int, world_size: int) -> None:
        dist.init_process_group("gloo")
        checkpoints = taking(str(tmp_path), two_nodes[rank].address, rank=rank, world_size=world_size)
        snapshot(checkpoints, 10, {f"w{rank}": torch.full((100,), float(rank + 1))})
        wait_until(lambda: all(node.steps(rank=1 - i, is_copy=True) == [10] for i, node in enumerate(two_nodes)))
        dist.barrier()
        if rank == 0:
            arena = checkpoints._staging._arenas[0]
            arena._map[arena.image.pieces[0].start] ^= 1
        dist.barrier()
        memory, found = meet(two_nodes[rank].address, rank=rank, world_size=world_size)
        targets = {"w0": torch.zeros(100), "w1": torch.zeros(100)}
        memory.open(found[0]).load(targets)
        assert targets["w0"].tolist() == [1.0] * 100 and targets["w1"].tolist() == [2.0] * 100

    run_ranks(take, 2, timeout=120)


def test_a_keeper_that_goes_in_the_middle_is_damage(node: Node, tmp_path: Path) -> None:
    """As reported in prime-diloco#156: whoever the state was copied from went before the copy had ended."""
    checkpoints = taking(str(tmp_path), node.address)
    snapshot(checkpoints, 10, expected())
    _wait_whole(checkpoints, node, 10)
    memory, found = meet(node.address)
    reader = memory.open(found[0])
    node.kill()
    targets = blank(expected())
    with pytest.raises(DamagedError, match="^the snapshot of step 10 in memory is damaged: rank 0's image"):
        reader.load(targets)
    with pytest.raises(DamagedError, match="cannot be read: rank 0's image"):
        memory.open(found[0])


def _read_as_keepers_stop(rank: int, world_size: int, addresses: list[Any], pids: dict[str, int], step: int) -> None:
    """The last rank, whose own keeper holds nothing, reads; whom it asks for an image is stopped as it asks."""
    dist.init_process_group("gloo")
    for module in (copies_module, memory_module):
        module.PART_SECONDS = module.CONNECT_SECONDS = 2.0  # type: ignore[attr-defined]
    stopped, request = list[int](), Memory.request

    def asked(self: Memory, holder: Holder, head: Any) -> Any:
        pid = pids[self._meeting.keepers[holder.keeper]["socket"]]
        if head["kind"] == "read" and head["what"] == "image" and len(stopped) < most and pid not in stopped:
            stopped.append(pid)
            os.kill(pid, signal.SIGSTOP)
        return request(self, holder, head)

    memory, found = meet(addresses[rank], rank=rank, world_size=world_size)
    if rank == world_size - 1:
        Memory.request = asked  # type: ignore[method-assign]
        reader = memory.open(next(snapshot for snapshot in found if snapshot.step == step))
        most = 1
        reader.load(targets := blank(expected()))
        assert_equal(targets, expected(seed=step))
        most = 2
        began = time.monotonic()
        with pytest.raises(DamagedError, match="image: the other side takes too long"):  # then storage is next
            reader.load(blank(expected()))
        assert len(stopped) == 2 and time.monotonic() - began < 100.0, "with the limits for a part, not without end"
    dist.barrier()


def test_a_keeper_that_is_stopped_in_the_middle_is_passed_over(two_nodes: list[Node], tmp_path: Path) -> None:
    third = Node()
    nodes = [*two_nodes, third]
    _take_all(str(tmp_path), [one.address for one in two_nodes])
    one, other = two_nodes

    def copied() -> set[int]:
        return {*one.steps(rank=1, is_copy=True)} & {*other.steps(rank=0, is_copy=True)}

    wait_until(copied)
    try:
        pids = {one.address["socket"]: one.pid for one in nodes}
        run_ranks(_read_as_keepers_stop, 3, [one.address for one in nodes], pids, max(copied()), timeout=120)
    finally:
        for each in two_nodes:
            os.kill(each.pid, signal.SIGCONT)
        third.end()


# ---- keepers that fail ----------------------------------------------------------------------------------------------


def test_training_goes_on_without_its_keeper_and_takes_the_next_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    node = Node()
    checkpoints = taking(str(tmp_path), node.address)
    assert checkpoints.snapshots is not None
    state = {"w": torch.zeros(100)}
    snapshot(checkpoints, 10, state)
    node.kill()
    for step in (20, 30, 40):
        snapshot(checkpoints, step, state)
        assert checkpoints.begin(step, state)[0], "saves do not depend on it"
    checkpoints.wait()
    assert checkpoints.snapshots.num_failed == 3 and checkpoints.num_committed == 3
    assert caplog.text.count("no snapshot was taken: this node's keeper") == 1
    again = Node(node.name)
    assert again.address["socket"] == node.address["socket"]
    checkpoints.snapshots._link._next = 0.0  # the pause is over
    snapshot(checkpoints, 50, state)
    _wait_whole(checkpoints, again, 50)
    again.end()


def test_a_buddy_out_of_reach_costs_copies_and_no_snapshot(two_nodes: list[Node], tmp_path: Path) -> None:
    addresses = [{**two_nodes[0].address, "port": 1}, two_nodes[1].address]  # nobody listens there

    def take(rank: int, world_size: int) -> tuple[int, int, int, int]:
        lines = list[str]()
        logging.getLogger("elastictrain").addHandler(handler := logging.Handler())
        handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
        dist.init_process_group("gloo")
        checkpoints = taking(str(tmp_path), addresses[rank], rank=rank, world_size=world_size)
        taken = checkpoints.snapshots
        assert taken is not None
        for step in range(10, 80, 10):
            snapshot(checkpoints, step, {f"w{rank}": torch.zeros(100)})
            wait_until(lambda step=step: step in two_nodes[rank].steps(rank=rank))  # type: ignore[misc]
        wait_until(lambda: (taken._hear(), taken.num_uncopied or rank == 0)[1])
        said = sum("snapshots are not copied: the buddy's keeper at 127.0.0.1:1: " in line for line in lines)
        return taken.num_taken, taken.num_failed, taken.num_uncopied, said

    (taken, failed, uncopied, said), (*others, _, others_said) = run_ranks(take, 2, timeout=120)
    assert [taken, failed, uncopied, said] == [7, 0, 0, 0]
    assert [*others, others_said] == [7, 0, 1]


def test_a_slow_buddy_is_waited_for_or_it_is_said_what_its_death_would_cost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (slow := tmp_path / "slow").touch()
    nodes = [Node(hooks=("part", "0.5", str(slow))) for _ in range(2)]  # for each image

    def take(rank: int, world_size: int) -> tuple[list[int], list[str]]:
        lines = list[str]()
        logging.getLogger("elastictrain").addHandler(handler := logging.Handler())
        handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
        dist.init_process_group("gloo")
        checkpoints = taking(str(tmp_path), nodes[rank].address, rank=rank, world_size=world_size)

        def keep(step: int, *, waits: bool) -> None:
            snapshot(checkpoints, step, {f"w{rank}": torch.zeros(100)})
            if waits:
                checkpoints.wait_for_snapshot(step)

        for step in (1, 2):
            keep(step, waits=True)
        copied = nodes[1 - rank].steps(rank=rank, is_copy=True)
        dist.barrier()
        monkeypatch.setattr(manager_module, "COPY_SECONDS", 0.1)
        for step in range(3, 10):
            keep(step, waits=True)
        for step in range(10, 11 + 2 * MANY):
            keep(step, waits=False)
        return copied, lines

    try:
        (copied, lines), (others_copied, others_lines) = run_ranks(take, 2, timeout=120)
    finally:
        for node in nodes:
            node.end()
    assert copied == others_copied == [1, 2]
    vain, behind = lines
    assert "the snapshot of step 3 is on no other node: training goes on, and waits for none before step 23" in vain
    assert "copies of snapshots take longer than the steps between two of them: if a node died now, " in behind
    assert others_lines == []


def test_a_keeper_that_dies_costs_snapshots_on_all_ranks(two_nodes: list[Node], tmp_path: Path) -> None:
    def take(rank: int, world_size: int) -> tuple[int, int]:
        dist.init_process_group("gloo")
        checkpoints = taking(str(tmp_path), two_nodes[rank].address, rank=rank, world_size=world_size)
        taken = checkpoints.snapshots
        assert taken is not None
        for step in range(10, 80, 10):
            dist.barrier()
            if step == 40 and rank == 1:
                two_nodes[1].kill_from_a_rank()
                wait_until(lambda: (taken._hear(), not taken._link.is_open)[1])
            dist.barrier()
            snapshot(checkpoints, step, {f"w{rank}": torch.zeros(100)})
        return taken.num_taken, taken.num_failed

    assert run_ranks(take, 2, timeout=120) == [(3, 4), (3, 4)]
    assert two_nodes[0].steps(), "what was whole before is still there"


def test_a_keeper_that_comes_anew_takes_its_place_in_the_ring(two_nodes: list[Node], tmp_path: Path) -> None:
    """It has another port, and knows of nobody: both directions are copied again."""
    again = tmp_path / "again"

    def take(rank: int, world_size: int) -> None:
        dist.init_process_group("gloo")
        address = two_nodes[rank].address
        checkpoints = taking(str(tmp_path), address, rank=rank, world_size=world_size)
        assert checkpoints.snapshots is not None
        snapshot(checkpoints, 10, {f"w{rank}": torch.zeros(100)})
        dist.barrier()
        if rank == 1:
            two_nodes[1].kill_from_a_rank()
            new = Node(two_nodes[1].name)
            again.write_text(str(new.pid))
            checkpoints.snapshots._link._find = lambda: new.address
        dist.barrier()
        step = 10
        while not dist_all(_is_copied(checkpoints)):
            step += 10
            snapshot(checkpoints, step, {f"w{rank}": torch.zeros(100)})
        dist.barrier()
        if rank == 1:
            new.end()

    def dist_all(mine: bool) -> bool:
        flag = torch.tensor(int(mine))
        dist.all_reduce(flag, op=dist.ReduceOp.MIN)
        return bool(flag)

    def _is_copied(checkpoints: CheckpointManager) -> bool:
        assert checkpoints.snapshots is not None
        checkpoints.snapshots._hear()
        return any(one.is_copied and one.step > 10 for one in checkpoints.snapshots._kept)

    run_ranks(take, 2, timeout=120)
    assert not is_running(int(again.read_text()))


def test_a_copy_that_breaks_off_is_forgotten(tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    flag.touch()
    sender, buddy = Node(hooks=("part", "kill", str(flag))), Node()

    def take(rank: int, world_size: int) -> None:
        dist.init_process_group("gloo")
        checkpoints = taking(str(tmp_path), (sender, buddy)[rank].address, rank=rank, world_size=world_size)
        snapshot(checkpoints, 10, {f"w{rank}": torch.zeros(100)})

    try:
        run_ranks(take, 2, timeout=120)
        wait_until(lambda: not is_running(sender.pid))
        assert buddy.steps(rank=1) == [10] and buddy.steps(rank=0, is_copy=True) == []
        wait_until(lambda: memory_of(buddy.pid) < 2000)
    finally:
        buddy.end()


def test_one_rank_without_a_keeper_means_no_snapshot_on_any(
    node: Node, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def take(rank: int, world_size: int) -> tuple[int, int]:
        dist.init_process_group("gloo")
        checkpoints = taking(
            str(tmp_path), node.address if rank == 0 else None, rank=rank, world_size=world_size, first=rank == 0
        )
        for step in (10, 20):
            snapshot(checkpoints, step, {"w": torch.zeros(100)})
        assert checkpoints.snapshots is not None
        return checkpoints.snapshots.num_taken, checkpoints.snapshots.num_failed

    assert run_ranks(take, 2, timeout=120) == [(0, 2), (0, 2)]
    assert manager(str(tmp_path)).newest() is None
