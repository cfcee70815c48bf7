"""``elastictrain stop``, ``drain`` and ``scale`` with real agents: who goes, at which step, and what a person is told."""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elastictrain.cli import control as control_module
from elastictrain.cli.main import _main
from elastictrain.elastic import control as elastic_control
from elastictrain.elastic import run_rendezvous
from elastictrain.elastic.chain import Member
from elastictrain.elastic.control import labels_of, node_called
from elastictrain.errors import UsageError
from elastictrain.metrics import ledger
from elastictrain.rundir import RunDir
from tests.elastic.fleet import wait_for
from tests.elastic.test_agent import Run
from tests.elastic.test_nodes import Nodes, make  # noqa: F401 - a fixture

Said = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Said:
    """The command in this process: code, stdout, stderr."""

    def one(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = _main([str(one) for one in arguments])
        said = capsys.readouterr()
        return code, said.out, said.err

    return one


def stands_by(run: Run) -> bool:
    return "standing by" in run.stderr


@pytest.mark.slow
def test_a_node_is_drained_the_run_is_scaled_the_leader_dies_and_all_the_others_are_stopped(
    make: Callable[..., Nodes],  # noqa: F811
    call: Said,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run_rendezvous, "PATIENCE", 0.2)  # they say it sooner that they stand by
    nodes = make(1, 3)
    for name in "abc":
        nodes.start(name)
    nodes.wait("a", "b", "c")
    nodes.start("d")
    wait_for(lambda: stands_by(nodes.runs["d"]))

    host = os.uname().nodename
    code, out, err = call("drain", nodes.run_dir, host)
    assert code == 2 and not out and all(nodes.id_of(name) in err for name in "abcd")
    code, out, err = call("drain", nodes.run_dir, "elsewhere")
    assert code == 2 and "no node is called elsewhere; there are:" in err

    gone = nodes.leader  # also the leader may be asked to go
    code, out, err = call("drain", nodes.run_dir, f"{host}-{nodes.runs[gone].pid}")
    assert code == 0 and re.search(r"has left at step \d+; 3 nodes go on", out), (out, err, nodes.said)
    left = nodes.runs.pop(gone).wait(is_last=False)
    assert (left["code"], left["reason"]) == (75, "preempt") and "this node has left at step" in left["message"]
    nodes.wait(*nodes.runs)
    nodes.check(planned=1)
    assert call("drain", nodes.run_dir, nodes.id_of(gone))[0] == 2, "it is nobody's name any more"

    code, out, err = call("scale", nodes.run_dir, "2")
    assert code == 0 and "the run's size is 1:2 nodes; 3 nodes are there\n" in out, (out, err, nodes.said)
    (number, aside) = re.findall(r"2 nodes train since step (\d+); standing by: (.*)\n", out)[0]
    (surplus,) = [name for name in nodes.runs if nodes.id_of(name) == aside]
    nodes.wait(*(name for name in nodes.runs if name != surplus))
    wait_for(lambda: "2 nodes train, which is MAX of this run's 1:2: standing by" in nodes.runs[surplus].stderr)
    assert nodes.entry.generation.boundary == int(number) and nodes.entry.generation.reason.endswith(f"by {aside}")
    code, out, err = call("scale", nodes.run_dir, "1:3", "--no-wait")
    assert (code, out) == (0, "the run's size is 1:3 nodes; 3 nodes are there\n"), (out, err, nodes.said)
    nodes.wait(*nodes.runs)
    nodes.check(planned=3)
    assert "this run's size is 1:2 nodes: --nnodes 1:3 of this node does not count" in nodes.runs[surplus].stderr
    assert call("scale", nodes.run_dir, "3")[1].endswith("3 nodes train\n"), "nothing has changed"

    nodes.start("e", nnodes=(2, 8))
    wait_for(lambda: stands_by(nodes.runs["e"]))
    assert "this run's size is 1:3 nodes: --nnodes 2:8 of this node does not count" in nodes.runs["e"].stderr
    nodes.kill(nodes.leader)
    nodes.wait(*nodes.runs)  # whoever leads then is asked
    nodes.start("f")
    wait_for(lambda: stands_by(nodes.runs["f"]))
    code, out, err = call("stop", nodes.run_dir)
    assert code == 0, (out, err, nodes.said)
    outcomes = {name: run.wait(is_last=False) for name, run in nodes.runs.items()}
    assert {one["code"] for one in outcomes.values()} == {75}
    assert "it waited for others" in outcomes.pop("f")["message"]
    (message,) = {one["message"] for one in outcomes.values()}
    step = (nodes.folder / "checkpoint").read_text()
    assert message == f"asked to stop: this node has stopped at step {step}"
    assert f"the run has stopped at step {step}\n" in out
    nodes.runs.clear()

    again = {name: nodes.start(name) for name in "gh"}
    nodes.wait(*again)
    assert call("stop", nodes.run_dir, "--no-wait")[0] == 0
    assert [run.wait(is_last=False)["code"] for run in again.values()] == [75, 75]


@pytest.mark.slow
def test_nodes_that_wait_can_be_scaled_and_stopped_too(make: Callable[..., Nodes], call: Said) -> None:  # noqa: F811
    """One node is missing, until it is not needed and then is again; and then one of two has gone."""
    nodes = make(2, 2)
    alone = nodes.start("a")
    wait_for(lambda: nodes.entry.leader is not None and nodes.entry.leader.node == nodes.id_of("a"))
    code, out, err = call("scale", nodes.run_dir, "1:2")
    assert code == 0 and out.endswith("1 node trains\n"), (out, err, nodes.said)
    nodes.wait("a")
    code, out, err = call("scale", nodes.run_dir, "2:2")
    (step,) = re.findall(r"1 node waits since step (\d+) for others: 2 are needed\n", out)
    assert (code, nodes.entry.generation.is_paused) == (0, True), (out, err, nodes.said)
    wait_for(lambda: "waiting for nodes, of which at least 2 are needed" in alone.stderr)
    assert (nodes.folder / "checkpoint").read_text() == step, "the state is kept"
    code, out, err = call("stop", nodes.run_dir)
    assert (code, alone.wait(is_last=False)["code"]) == (0, 75), (out, err, nodes.said)
    nodes.runs.clear()

    nodes.start("b")
    nodes.start("c")
    nodes.wait("b", "c")
    code, out, err = call("drain", nodes.run_dir, nodes.id_of("b"))
    assert code == 0 and "the others wait for nodes, of which 2 are needed" in out, (out, err, nodes.said)
    saved = (nodes.folder / "checkpoint").read_text()
    assert [code := call("stop", nodes.run_dir)[0], nodes.runs["c"].wait(is_last=False)["code"]] == [0, 75], nodes.said
    outcome = nodes.runs["b"].wait(is_last=False)
    assert (outcome["code"], str(outcome["step"])) == (75, saved)
    nodes.runs.clear()


def test_a_run_that_cannot_be_asked_is_one_line(
    make: Callable[..., Nodes],  # noqa: F811
    call: Said,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(*arguments: object) -> tuple[int, str]:
        code, out, err = call(*arguments)
        assert not out and len(err.splitlines()) == 1, (out, err)
        return code, err

    assert refused("stop", tmp_path / "nothing") == (2, f"elastictrain: error: {tmp_path}/nothing holds no run: give the"
            " directory that `elastictrain run --run-dir` was given\n")  # fmt: skip
    assert refused("scale", tmp_path / "nothing", "2")[0] == 2
    for size in ("3:2", "0", "0:2", "two", "", ":4", "-1", "9999999999"):
        code, line = refused("scale", tmp_path, "--", size)
        assert code == 2 and f"{size} is no size of a run: write a number of nodes" in line
    nodes = make(1, 2)
    nodes.start("a")
    nodes.wait("a")
    monkeypatch.setenv("ELASTICTRAIN_TOKEN", "not the token of this run")
    code, line = refused("stop", nodes.run_dir)
    assert code == 1 and "was not written with this run's token" in line
    monkeypatch.delenv("ELASTICTRAIN_TOKEN")
    assert refused("stop", nodes.run_dir, "--rdzv-id", "other")[0] == 2
    token = (nodes.run_dir / "token").read_text()
    (nodes.run_dir / "token").unlink()
    code, line = refused("stop", nodes.run_dir)
    assert code == 1 and "holds no token: set ELASTICTRAIN_TOKEN" in line
    (nodes.run_dir / "token").write_text(token)
    monkeypatch.setattr(elastic_control, "ANSWER_SECONDS", 0.1)
    monkeypatch.setattr(elastic_control, "TAKEOVER_SECONDS", 0.2)
    monkeypatch.setattr(elastic_control, "HANDSHAKE_SECONDS", 0.1)
    nodes.runs["a"].signal(signal.SIGSTOP)  # it is there, and does not say so
    code, line = refused("drain", nodes.run_dir, "a")
    assert code == 1 and f"nobody leads it, though {nodes.id_of('a')}" in line
    code, line = refused("scale", nodes.run_dir, "2")
    assert code == 1 and "cannot be scaled: nobody leads it" in line
    nodes.kill("a")
    code, line = refused("drain", nodes.run_dir, "a")
    assert code == 1 and "has no nodes to choose from: none of its nodes answers" in line


def test_agents_without_a_log_get_a_signal_on_their_host_alone(
    call: Said, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path / "agent", workers=1, steps=1_000_000, pace=0.005)
    run.wait_for_step(2)
    worker = {"rank": 0, "pid": int((tmp_path / "agent" / "pid-0-0").read_text())}
    host, now = socket.gethostname(), time.time()
    start = {"event": "start", "generation": 0, "time": now, "step": 0, "world_size": 1}
    node = {
        "event": "node",
        "generation": 0,
        "node": host,
        "reached": 0,
        "time": now,
        "name": host,
        "host": host,
        "agent_pid": run.pid,
    }
    lines = [start]
    monkeypatch.setattr(ledger, "read_ledger", lambda place: lines)

    def refused(*arguments: object) -> str:
        code, out, err = call(*arguments)
        assert code == 1 and not out and len(err.splitlines()) == 1, (out, err)
        return err

    assert "has only begun" in refused("stop", tmp_path)
    lines = [start, {**node, "host": "elsewhere", "workers": [worker]}]
    assert f"send SIGTERM to process {run.pid} on elsewhere" in refused("stop", tmp_path)
    lines = [start, {**node, "workers": [{"rank": 0, "pid": os.getpid()}]}]  # a number that another process has now
    assert f"is not running: no process {run.pid} with its workers" in refused("stop", tmp_path)
    assert "ended by `elastictrain stop`" in refused("drain", tmp_path, host)
    assert "it has no run log, as with --nnodes 1" in refused("scale", tmp_path, "2")
    lines = [start, {**node, "workers": [worker]}]
    reaper = threading.Thread(target=lambda: outcomes.append(run.wait()))
    outcomes: list[dict[str, Any]] = []
    reaper.start()
    code, out, err = call("stop", tmp_path)
    reaper.join()
    assert (code, outcomes[0]["code"]) == (0, 75), (out, err, run.stderr)
    assert f"1 node asked to stop: agent pid {run.pid}\nthe run has stopped" in out
    lines = [start, {**node, "workers": [worker]}, {"event": "end", "generation": 0, "time": now, "outcome": "preempt"}]
    assert "is not running: preempted at step 0" in refused("stop", tmp_path)


def test_an_end_that_saved_nothing_is_a_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = RunDir(tmp_path)
    place.create(b"{}", "run.json")
    assert control_module._tell_the_end(place, 12) == 1
    assert "step 12 was not saved, there is no checkpoint" in capsys.readouterr().err
    place.create(b"{}", "checkpoints", "step-00000012", "a1", "COMMIT")
    assert control_module._tell_the_end(place, 12) == 0
    assert "step 12 is saved in " in capsys.readouterr().out
    assert control_module._tell_the_end(place, 13) == 1
    assert "step 13 was not saved, the newest checkpoint is of step 12" in capsys.readouterr().err


def test_names() -> None:
    nodes = [Member(f"host{number}-{pid}-abc{number}", f"10.0.0.{number}") for number, pid in ((1, 7), (10, 8), (2, 7))]
    assert labels_of(nodes[0]) == ("host1-7-abc1", "10.0.0.1-7-abc1")
    for text, index in (("host1", 0), ("host10", 1), ("10.0.0.1", 0), ("10.0.0.2-7", 2), ("abc2", 2), ("-8-", 1)):
        assert node_called(text, nodes) is nodes[index], text
    for text, said in (("host", "may be any of host1-7-abc1, host10-8-abc10, host2-7-abc2"), ("", "no node is called"),
                       ("host3", "there are: host1-7-abc1, ")):  # fmt: skip
        with pytest.raises(UsageError, match=said):
            node_called(text, nodes)
