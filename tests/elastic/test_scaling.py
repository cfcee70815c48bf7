"""Another size for a run that is on, and hosts that are lost again and again: scenes in a world with a virtual clock."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastictrain.elastic.actions import Close, Send
from elastictrain.elastic.chain import Loss, Member, Size
from elastictrain.elastic.flapping import MAX_HOSTS, Flapping
from elastictrain.elastic.leader import Leader
from elastictrain.elastic.timing import Timing
from tests.elastic.test_protocol import first_failure, formed, members, others
from tests.elastic.world import TIMING, Node, World


def scale(world: World, least: int, most: int) -> None:
    world.control(world.leader, {"do": "scale", "min": least, "max": most})


def is_so(world: World, count: int) -> bool:
    return world.agree() and len(members(world)) == count


# ---- size --------------------------------------------------------------------------------------------------------------


def test_those_above_a_new_maximum_stand_by_from_one_step_on_and_step_in_again() -> None:
    world = formed(4)
    before = members(world)
    scale(world, 0, 3)
    scale(world, 0, 3)  # asking twice is asking once
    world.until(lambda: is_so(world, 3), seconds=5.0)
    entry, number = world.log[-1], world.log[-1].generation.number
    assert members(world) == before[:3] and entry.generation.boundary > 0
    assert (entry.size, entry.generation.size) == (Size(2, 3), Size(2, 3)), "the least number is as it was"
    assert entry.generation.reason == f"MAX is 3: standing by {before[3]}"
    surplus = world.nodes[before[3]]
    world.pass_time(2.0)
    assert not surplus.is_leaving and not surplus.has_left and world.log[-1].generation.number == number
    scale(world, 2, 8)
    world.until(lambda: is_so(world, 4), seconds=5.0)
    assert members(world) == before and world.log[-1].generation.boundary > entry.generation.boundary


def test_a_size_that_changes_nobody_changes_no_generation() -> None:
    world = formed(3)
    number = world.log[-1].generation.number
    scale(world, 1, 9)
    world.until(lambda: world.size == Size(1, 9) and world.agree(), seconds=5.0)
    world.pass_time(2.0)
    assert world.log[-1].generation.number == number


def test_with_fewer_nodes_than_a_new_minimum_all_stop_at_one_step_and_go_on_with_a_lower_one() -> None:
    world = formed(3)
    before = members(world)
    scale(world, 4, 4)
    world.until(lambda: world.log[-1].generation.is_paused, seconds=5.0)
    paused = world.log[-1].generation
    assert (members(world), paused.reason) == (before, "4 nodes are needed") and paused.boundary > 0
    world.pass_time(3.0)
    assert {world.nodes[name].peer.step for name in before} == {paused.boundary}, "nobody trains"
    scale(world, 1, 3)
    world.until(lambda: not world.log[-1].generation.is_paused, seconds=5.0)
    assert members(world) == before


def asked_to_be_smaller() -> World:
    """Four nodes that are to be two, and have not come to a step since."""
    world = formed(4)
    for node in world.nodes.values():
        node.pace = 5.0
    scale(world, 1, 2)
    world.until(lambda: world.size == Size(1, 2), seconds=5.0)
    return world


def test_a_new_size_survives_the_leader_that_took_it() -> None:
    world = asked_to_be_smaller()
    assert len(members(world)) == 4
    world.crash(world.leader)
    world.until(lambda: is_so(world, 2), seconds=60.0)


def test_a_loss_as_a_run_is_made_smaller_takes_nobody_else_out_before_a_step_is_agreed_on() -> None:
    """What the lost node had, those above the new MAX alone may hold: they step aside once it is whole elsewhere."""
    world = asked_to_be_smaller()
    lost = others(world)[0]
    left = [name for name in members(world) if name != lost.name]
    world.crash(lost)
    world.until(lambda: lost.name not in members(world), seconds=5.0)
    assert members(world) == left and world.log[-1].generation.boundary == -1
    world.until(lambda: is_so(world, 2), seconds=60.0)
    last = world.log[-1].generation
    assert members(world) == left[:2] and last.boundary >= 0 and last.reason == f"MAX is 2: standing by {left[2]}"


def test_a_node_that_joins_obeys_the_run_and_not_its_own_command() -> None:
    world = formed(2)
    world.spawn(timing=replace(TIMING, min_nodes=1, max_nodes=2))
    world.until(lambda: is_so(world, 3))
    world.crash(world.leader)
    world.crash(others(world)[0])  # the one with the other command is left, and 2 are needed
    world.pass_time(10.0)
    (left,) = [node for node in world.nodes.values() if node.is_alive]
    assert left.size == Size(2, 4) and left.current.number == world.log[-1].generation.number
    assert len(members(world)) == 3, "nothing is formed"


def test_where_nobody_is_left_the_size_is_the_next_command_s() -> None:
    world = formed(3)
    scale(world, 3, 3)
    world.until(lambda: world.size == Size(3, 3) and world.agree(), seconds=5.0)
    for node in list(world.nodes.values()):
        world.crash(node)
    world.spawn(timing=replace(TIMING, min_nodes=1, max_nodes=5))
    world.spawn(timing=replace(TIMING, min_nodes=1, max_nodes=5))
    world.until(lambda: is_so(world, 2))
    assert world.size == Size(1, 5) and all(node.size is None for node in world.nodes.values() if node.is_alive)


def test_in_a_run_given_again_after_its_end_a_node_with_another_command_is_told_the_size() -> None:
    """Also before it has begun: what `elastictrain scale` then asks for is in the log, and every node knows it."""
    world = formed(3)
    for node in list(world.nodes.values()):
        world.crash(node)
    first = world.spawn(timing=replace(TIMING, min_nodes=2, max_nodes=5))
    world.until(lambda: first.peer.leading is not None)
    scale(world, 3, 6)
    world.until(lambda: world.size == Size(3, 6), seconds=5.0)
    late = [world.spawn(timing=replace(TIMING, min_nodes=1, max_nodes=2)) for _ in range(2)]
    world.until(lambda: late[0].size == Size(3, 6), seconds=5.0)
    scale(world, 2, 5)
    world.until(lambda: world.size == Size(2, 5), seconds=5.0)
    world.until(lambda: world.agree() and members(world)[0] == first.name)
    assert [node.size for node in (first, *late)] == [Size(2, 5)] * 3


def test_what_is_no_size_is_refused() -> None:
    world = formed(3)
    before = world.log[-1]
    for least, most in ((3, 2), (1, 0), (-1, 3), ("1", 2)):
        wish = {"is": "control", "do": "scale", "min": least, "max": most}
        assert Close((99,)) in world.leader.peer.on_message(99, wish, world.now), (least, most)
    assert Close((99,)) in world.leader.peer.on_message(99, {"is": "control", "do": "scale"}, world.now)
    world.pass_time(2.0)
    assert world.log[-1] == before


def test_the_leader_says_when_it_has_nothing_more_to_do() -> None:
    world = formed(4)

    def look() -> tuple[list[int], bool]:
        said = world.leader.peer.on_message(99, {"is": "control", "do": "look"}, world.now)
        (answer,) = [action.message for action in said if isinstance(action, Send) and action.links == (99,)]
        return answer["size"], answer["settled"]

    world.pass_time(1.0)
    assert look() == ([2, 4], True)
    scale(world, 1, 2)
    assert look() == ([1, 2], False)
    world.until(lambda: look()[1], seconds=5.0)
    assert len(members(world)) == 2


def test_a_leader_that_keeps_to_its_own_command_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    failure = first_failure(monkeypatch, Leader, "size", property(lambda self: self.timing.size))
    assert "wrote what must not be" in failure


# ---- hosts that are lost again and again -------------------------------------------------------------------------------


def come_back(world: World, node: Node) -> Node:
    """Its host's agent is killed and started again."""
    world.crash(node)
    world.until(lambda: node.name not in members(world))
    return world.spawn(host=node.peer.me.host)


def until_in(world: World, node: Node) -> float:
    return world.until(lambda: node.name in members(world) and world.agree())


def test_a_host_that_is_lost_again_and_again_is_kept_out_for_a_growing_time() -> None:
    world = formed(4, max_nodes=8, return_delay=8.0, max_return_delay=20.0)
    node, took = others(world)[0], []
    for _ in range(5):
        node = come_back(world, node)
        took.append(until_in(world, node))
        told = node.kept_out
    assert took[0] < 3.0 and not others(world)[0].kept_out, "the first return is at once"
    assert 7.0 < took[1] < 11.0 and 15.0 < took[2] < 19.0, took
    assert all(19.0 < one < 23.0 for one in took[3:]), "and no longer than that"
    assert [times for times, _ in told] == [5], "said once"
    world.pass_time(45.0)  # two are forgotten
    node = come_back(world, node)
    assert 15.0 < until_in(world, node) < 19.0 or node.kept_out[0][0] == 4


def test_a_new_leader_knows_whom_to_keep_out() -> None:
    world = formed(4, max_nodes=8, return_delay=8.0, max_return_delay=60.0)
    node = come_back(world, others(world)[0])
    until_in(world, node)
    node = come_back(world, node)
    world.pass_time(4.0)
    world.crash(world.leader)
    world.until(lambda: len(members(world)) == 2)
    assert 4.0 < until_in(world, node) < 12.0
    assert [times for times, _ in node.kept_out] == [2, 2], "by each leader"


def test_whoever_leaves_with_notice_may_come_back_at_once() -> None:
    world = formed(4, max_nodes=8, return_delay=60.0, max_return_delay=60.0)
    node = others(world)[0]
    for _ in range(3):
        world.tell(node, node.peer.on_leave)
        node.is_leaving = True
        world.until(lambda: node.has_left and not node.is_alive)  # noqa: B023
        node = world.spawn(host=node.peer.me.host)
        assert until_in(world, node) < 10.0
    assert not world.log[-1].losses


def test_who_is_needed_is_let_in_at_once() -> None:
    world = formed(2, min_nodes=2, max_nodes=8, return_delay=60.0, max_return_delay=60.0)
    node = others(world)[0]
    for _ in range(3):
        world.crash(node)
        node = world.spawn(host=node.peer.me.host)
        assert until_in(world, node) < 5.0


def test_a_host_with_another_member_on_it_is_there() -> None:
    world = formed(3, max_nodes=8, return_delay=60.0, max_return_delay=60.0)
    host = others(world)[0].peer.me.host
    other = world.spawn(host=host)
    until_in(world, other)
    for _ in range(3):
        other = come_back(world, other)
        assert until_in(world, other) < 5.0


def test_it_can_be_turned_off() -> None:
    world = formed(4, max_nodes=8, return_delay=0.0)
    node = others(world)[0]
    for _ in range(4):
        node = come_back(world, node)
        assert until_in(world, node) < 3.0


def test_what_is_remembered_of_hosts_is_bounded() -> None:
    flapping = Flapping((), [Member("a", "a")], Timing(), now=0.0)
    for number in range(MAX_HOSTS + 50):
        flapping.committed(flapping.after({f"h{number}"}, now=1.0), [Member("a", "a")], now=1.0)
    assert len(flapping.losses) == MAX_HOSTS and flapping.losses[-1] == Loss(f"h{MAX_HOSTS + 49}", 1, 0.0)
    many = Flapping((Loss("a", 100_000, 300.0),), [], Timing(), now=0.0)
    assert many.after({"a"}, now=1.0)[-1] == Loss("a", 100_001, 300.0)


def test_a_leader_that_keeps_nobody_out_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    failure = first_failure(monkeypatch, Flapping, "wait", lambda self, host, losses, *, now: (0, 0.0), first=40)
    assert "should still be kept out" in failure
