"""What users of other programs have reported of rendezvous, restarts, joins and losses: each is a scene that ends well here.

Where another test shows it already, that test names the report; docs/elasticity.md lists all of them.
"""

from __future__ import annotations

import re
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from elastictrain.elastic.agent_config import AgentConfig
from tests.elastic.fleet import ROOT
from tests.elastic.test_agent import Run
from tests.elastic.test_protocol import formed, members, others
from tests.elastic.world import TIMING, World


def settled(world: World, *names: str) -> bool:
    return world.agree() and set(members(world)) == set(names)


def living(world: World) -> list[str]:
    return [node.name for node in world.nodes.values() if node.is_alive and not node.has_left]


@pytest.mark.parametrize("is_leader", [False, True])
def test_an_agent_that_was_killed_and_started_again_at_once_closed_the_run_for_the_others(is_leader: bool) -> None:
    """pytorch#147064: the other agent died of RendezvousClosedError. Here nothing is closed, and the new one joins."""
    world = formed(3)
    victim = world.leader if is_leader else others(world)[0]
    for _ in range(2):
        world.crash(victim)
        again = world.spawn(host=victim.peer.me.host)  # before anybody has noticed
        world.until(lambda: settled(world, *living(world)))
        assert len(members(world)) == 3 and again.name in members(world)
        victim = again
    assert not any(entry.closed for entry in world.log)


def test_a_missed_heartbeat_left_everybody_stuck_for_half_an_hour() -> None:
    """pytorch#111646. Here the silent node is taken out after ``ttl``, and comes back when it speaks again."""
    world = formed(4)
    silent = others(world)[0]
    silent.frozen_until = world.now + 5.0
    took = world.until(
        lambda: settled(world, *(set(living(world)) - {silent.name})) or silent.name not in members(world)
    )
    assert took < 3 * TIMING.ttl
    world.until(lambda: settled(world, *living(world)))
    assert len(members(world)) == 4


def test_the_last_call_closed_before_the_latecomers() -> None:
    """basilica#493: nodes that came after the last call were never let in. Here they join at the next agreed step."""
    world = formed(2, max_nodes=8)
    world.pass_time(10 * TIMING.form)
    late = [world.spawn().name for _ in range(3)]
    world.until(lambda: settled(world, *living(world)))
    assert set(late) < set(members(world)) and world.log[-1].generation.boundary > 0


def test_one_pod_was_pending_and_the_others_looped() -> None:
    """dlrover#1175: they restarted again and again. Here they wait, and write nothing meanwhile."""
    world = World(1, num_nodes=2, num_faults=0, timing=replace(TIMING, min_nodes=3))
    world.pass_time(3.0)
    waiting = world.log[-1]
    world.pass_time(120.0)
    assert world.log[-1] == waiting and waiting.generation.number == 0
    world.spawn()
    world.until(lambda: settled(world, *living(world)), seconds=5.0)
    assert world.log[-1].generation.number == 1


def test_thirty_pods_lost_at_once_took_ten_minutes() -> None:
    """dlrover#1690. Here losses at one moment are one change, or two."""
    world = formed(40, max_nodes=64)
    number = world.log[-1].generation.number
    for node in others(world)[:30]:
        world.crash(node)
    assert world.until(lambda: settled(world, *living(world))) < 1.0
    assert len(members(world)) == 10 and world.log[-1].generation.number <= number + 2


def test_a_dead_member_was_counted_for_ever() -> None:
    """torchft#63: it counted for the least number of nodes. Here the run waits for one that is alive."""
    world = formed(3, min_nodes=3)
    dead = others(world)[0]
    world.crash(dead)
    before = world.log[-1].generation
    world.pass_time(20.0)
    assert world.log[-1].generation == before, "two of three are too few, whatever the last generation says"
    world.spawn()
    world.until(lambda: settled(world, *living(world)), seconds=5.0)
    assert dead.name not in members(world) and len(members(world)) == 3


@pytest.mark.parametrize("dies", [False, True])
def test_the_donor_of_a_joining_node_went_before_the_copy_had_ended(dies: bool) -> None:
    """prime-diloco#156: the joiner waited for ever. Here another generation follows, and its members have the state."""
    world = formed(3, max_nodes=8)
    joiner = world.spawn()
    world.until(lambda: joiner.name in members(world))  # it begins to copy
    donor = others(world)[0]
    assert donor is not joiner
    if dies:
        world.crash(donor)
    else:
        donor.is_leaving = True
        world.tell(donor, donor.peer.on_leave)
    world.until(lambda: settled(world, *(set(living(world)) - {donor.name})))
    assert joiner.name in members(world)
    world.until(lambda: joiner.current == world.log[-1].generation, seconds=5.0)


def test_workers_were_killed_thirty_seconds_after_sigterm_and_a_long_step_saved_nothing(tmp_path: Path) -> None:
    """pytorch#119856: a fixed limit, where the scheduler gives ten minutes; goodfire/spd#677: the notice came in the middle
    of a long step. Here the step is finished and saved within ``--grace``, however soon others would be killed."""
    assert AgentConfig([]).grace == 600.0
    run = Run(tmp_path, workers=1, steps=100, pace=1.5)
    assert run.config.kill_after < 1.5
    run.wait_for_step(1)
    run.signal(signal.SIGTERM)
    outcome = run.wait()
    assert (outcome["code"], outcome["reason"]) == (75, "preempt")
    assert (tmp_path / "checkpoint").read_text() == str(outcome["step"])


def test_every_report_in_the_documentation_is_named_by_the_test_that_shows_it() -> None:
    text = (
        (ROOT / "docs" / "elasticity.md").read_text().split("### What users of others report", 1)[1].split("\n### ")[0]
    )
    rows = re.findall(r"^\| (.+?) \| .* \| `(.+?)::(.+?)` \|$", text, re.MULTILINE)
    assert len(rows) > 20
    for reports, file, name in rows:
        source = (ROOT / "tests" / file).read_text()
        assert f"def {name}(" in source, f"{file} has no {name}"
        shown = source.split(f"def {name}(", 1)[1].split("\ndef ", 1)[0]
        for report in reports.split(", "):
            assert report in shown, f"{file}::{name} does not name {report}"
