"""``--snapshot-every`` with real agents, workers and keepers: who dies, and from where training goes on."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from elastictrain import CheckpointConfig, Trainer
from elastictrain.checkpoint import keeper_process
from elastictrain.metrics.ledger import read_ledger
from elastictrain.reports.facts import facts, read_report
from elastictrain.reports.page import page
from elastictrain.rundir import RunDir
from tests import forked
from tests.checkpoint.nodes import wait_until
from tests.cli.net_task import Net
from tests.cli.test_run import Command, logged
from tests.processes import children_of, is_running

TASK = str(Path(__file__).with_name("dying_task.py"))
STEPS = 16


def command(folder: Path, name: str, how: str, *argv: str) -> Command:
    """Its output is in a folder of its own."""
    (folder / name).mkdir()
    settings = ["--set", f"folder={folder}", "--set", f"how={how}", "--set", "pace=0.01"]
    options = ["--run-dir", str(folder / "run"), "--max-steps", str(STEPS), "--snapshot-every", "5", "--log-every", "1"]
    return Command(folder / name, f"{TASK}:Dying", *options, *settings, *argv, before=forked.install)


def keeper_of(agent: int) -> int | None:
    """The keeper that the agent has started."""
    return next(iter(children_of(agent, running="keeper")), None)


def losses(run_dir: Path) -> dict[int, float]:
    """By step; those that were done twice came out the same."""
    found: dict[int, float] = {}
    for row in logged(run_dir):
        if "train/loss" in row:
            assert found.setdefault(row["step"], row["train/loss"]) == pytest.approx(row["train/loss"], rel=1e-5)
    return found


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    folder = tmp_path_factory.mktemp("whole")
    Trainer(run_dir=str(folder), max_steps=STEPS, log_every=1).fit(Net())
    return losses(folder)


def check(folder: Path, uninterrupted: dict[int, float]) -> None:
    found = losses(folder / "run")
    assert sorted(found) == list(range(1, STEPS + 1)), "also what had been logged and not written when it died"
    assert found == pytest.approx(uninterrupted, rel=1e-5)


@pytest.mark.slow
def test_a_killed_worker_goes_on_from_memory(tmp_path: Path, uninterrupted: dict[int, float]) -> None:
    run = command(tmp_path, "one", "worker", "--nproc-per-node", "2")
    wait_until((tmp_path / "died").exists, seconds=100.0)
    keeper = keeper_of(run.pid)
    assert keeper is not None
    assert run.wait() == 0, run.text
    assert "resumed: from step 10 (the snapshot of step 10 in memory)" in run.text
    check(tmp_path, uninterrupted)
    wait_until(lambda: not is_running(keeper))


@pytest.mark.slow
def test_a_killed_agent_finds_its_keeper_again(tmp_path: Path) -> None:
    """The same command on fewer ranks. One image has been damaged: the snapshot before is taken, and it is said."""
    run = command(tmp_path, "one", "agent", "--nproc-per-node", "2")
    wait_until(lambda: keeper_of(run.pid), seconds=100.0)
    keeper = keeper_of(run.pid)
    assert keeper is not None and run.wait() == -signal.SIGKILL
    assert is_running(keeper)
    again = command(tmp_path, "two", "agent", "--nproc-per-node", "1")
    assert again.wait() == 0, again.text
    assert "note: the snapshot of step 10 in memory is damaged: rank 0's image: shard-00000-of-00002" in again.text
    assert "; going on from the snapshot of step 5 in memory" in again.text
    assert "resumed: from step 5 (the snapshot of step 5 in memory)" in again.text
    assert max(losses(tmp_path / "run")) == STEPS
    wait_until(lambda: not is_running(keeper))


@pytest.mark.slow
def test_a_killed_node_gets_its_state_from_its_buddy(
    tmp_path: Path, uninterrupted: dict[int, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """kill -9 of a whole agent with its worker and its keeper; it is started again and has nothing of its own.

    Copies are slower than snapshots come, and are waited for: what the death costs is what came after the last snapshot.
    """
    (slow := tmp_path / "slow").touch()
    hooks = ("tests.checkpoint.hooked_keeper", "part", "0.4", str(slow))
    monkeypatch.setattr(keeper_process.KeeperProcess, "command", (sys.executable, "-m", *hooks))
    meet = ["--nnodes", "2", "--nproc-per-node", "1", "--local-addr", "127.0.0.1", "--rdzv-conf", "ttl=20"]
    meet += ["--snapshot-wait"]
    one = command(tmp_path, "one", "node", *meet)
    monkeypatch.setenv("TEST_NODE", "two")
    two = command(tmp_path, "two", "node", *meet)
    wait_until((tmp_path / "died").exists, seconds=100.0)
    agent, step = map(int, (tmp_path / "died").read_text().split())
    assert agent == two.pid
    keeper = keeper_of(two.pid)
    assert keeper is not None and keeper != keeper_of(one.pid)
    wait_until(lambda: len([line for line in read_ledger(RunDir(tmp_path / "run")) if line["event"] == "node"]) == 2)
    for pid in (two.pid, keeper):
        os.kill(pid, signal.SIGKILL)
    assert two.wait() == -signal.SIGKILL
    wait_until(lambda: not is_running(keeper))
    again = command(tmp_path, "again", "node", *meet)
    assert (one.wait(), again.wait()) == (0, 0), one.text + again.text
    resumed = re.search(r"resumed: from step (\d+) \(the snapshot of step \1 in memory\)", one.text + again.text)
    assert resumed is not None and int(resumed[1]) == step == 10, one.text + again.text
    check(tmp_path, uninterrupted)
    told = read_report(RunDir(tmp_path / "run"))
    one_row, other_row = told.timeline.rows
    assert {stretch.node.rpartition("-")[2] for stretch in one_row.stretches} == {str(one.pid)}
    assert {stretch.node.rpartition("-")[2] for stretch in other_row.stretches} == {str(two.pid), str(again.pid)}
    assert told.timeline.starts[1].text.endswith("started again"), "the same node, by its name"
    assert told.status["state"] == "finished" and len(told.status["nodes"]) == 2
    assert [one["lost_steps"] for one in told.status["recoveries"]] == [2]
    assert "2 on 2 nodes" in dict(facts(told))["ranks"] and page(told).count('class="m-recovery"') == 1


def test_without_a_keeper_it_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options: dict[str, Any] = {"max_steps": 1, "checkpoint": CheckpointConfig(snapshot_every=1)}
    reasons = {
        str(tmp_path / "run"): "snapshots are kept by elastictrain run: start it with that",
        "memory://run-of-snapshots": "memory://run-of-snapshots ends with its process",
        None: "without a run directory nothing is kept",
    }
    for run_dir, reason in reasons.items():
        Trainer(run_dir=run_dir, **options).fit(Net())
        assert f"note: snapshot_every=1 does nothing here: {reason}" in " ".join(capsys.readouterr().out.split())
