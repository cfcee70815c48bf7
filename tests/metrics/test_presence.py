"""What agents say of themselves: nothing before there is a run, a last word though they are killed, and it adds up."""

from __future__ import annotations

import itertools
import json
import logging
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from elastictrain.errors import UsageError
from elastictrain.machine import process_began
from elastictrain.metrics import ledger as ledger_module
from elastictrain.metrics import presence as presence_module
from elastictrain.metrics.earlier import spent_before
from elastictrain.metrics.goodput import goodput, stretches
from elastictrain.metrics.ledger import fold_agents, is_sound, ledger_folder, read_ledger
from elastictrain.metrics.presence import Presence, node_id, pieces
from elastictrain.metrics.status import status
from elastictrain.metrics.timeline import timeline
from elastictrain.rundir import RunDir
from tests import forked
from tests.checkpoint.nodes import wait_until
from tests.checkpoint.proxy import Proxy
from tests.cli.test_run import NET, Command
from tests.metrics.test_goodput import node, nonzero, spent, start
from tests.processes import began_at


def told(run_dir: Path | str) -> list[dict[str, Any]]:
    return [line for line in read_ledger(RunDir(run_dir)) if line["event"] == "agent"]


def agent(begin: float, end: float, *phases: list[Any], name: str = "a", **more: Any) -> dict[str, Any]:
    about = {"event": "agent", "generation": 0, "node": name, "name": name, "host": name, "agent_pid": 7}
    line = {**about, "from": begin, "to": end, "phases": [["startup", begin], *phases], "reached": -1}
    line |= {"beat": 60.0, "ended": False}
    line |= more
    assert is_sound(line)
    return line


# ---- writing -------------------------------------------------------------------------------------------------------


def test_a_process_begins_when_the_kernel_starts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert process_began() == pytest.approx(began_at(os.getpid()), abs=0.05) and process_began() < time.time()
    monkeypatch.delattr(time, "CLOCK_BOOTTIME")
    assert process_began() == pytest.approx(time.time(), abs=1.0), "where nobody says it, it begins now"


def test_nothing_is_written_before_there_is_a_run(tmp_path: Path) -> None:
    began = time.time() - 5.0
    with Presence(name="n", began=began, run_dir=str(tmp_path)) as presence:
        presence.doing("waiting", since=began + 3.0)
        time.sleep(3 * presence_module.BEAT)
        assert not any(tmp_path.iterdir())
        (tmp_path / "run.json").write_text("{}")
        wait_until(lambda: bool(told(tmp_path)))
        (line,) = told(tmp_path)
        assert not line["ended"] and line["node"] == node_id("n", os.getpid())
        presence.doing("startup")
        presence.reached = 3
        wait_until(lambda: told(tmp_path)[0]["reached"] == 3)
        assert told(tmp_path)[0]["to"] > line["to"]
    (line,) = told(tmp_path)
    assert line["ended"] and [cause for cause, _ in line["phases"]] == ["startup", "waiting", "startup"]
    found = pieces(line)
    assert [stop - start for start, stop, _ in found[:2]] == pytest.approx([3.0, 2.0], abs=0.5)
    assert found[0][0] == began and found[-1][1] == line["to"] <= time.time()
    assert goodput(read_ledger(RunDir(tmp_path))).total == pytest.approx(line["to"] - began)


@pytest.mark.parametrize("how", ["error", "outcome"])
def test_a_command_that_is_refused_leaves_nothing(how: str, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    try:
        with Presence(run_dir=str(tmp_path)) as presence:
            wait_until(lambda: bool(told(tmp_path)))
            if how == "error":
                raise UsageError("no")
            presence.refused()
    except UsageError:
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_of_a_script_workers_tell_where_its_ledger_is(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    with Presence() as presence:
        presence.look_in(str(tmp_path / "told.json"))
        time.sleep(2 * presence_module.BEAT)
        (tmp_path / "told.json").write_text(json.dumps({"run_dir": str(tmp_path)}))
        wait_until(lambda: bool(told(tmp_path)))


def test_whoever_is_killed_was_there_until_then(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    before = time.time()
    if not (pid := os.fork()):
        try:
            with Presence(run_dir=str(tmp_path)) as presence:
                presence.doing("productive")
                time.sleep(60)
        finally:
            os._exit(1)
    try:
        wait_until(lambda: bool(told(tmp_path)) and len(told(tmp_path)[0]["phases"]) == 2)
        seen = told(tmp_path)[0]["to"]
        wait_until(lambda: told(tmp_path)[0]["to"] > seen)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    (line,) = told(tmp_path)
    assert before <= line["from"] < seen < line["to"] <= time.time() and not line["ended"]


def test_a_line_that_becomes_shorter_is_still_one(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    with Presence(run_dir=str(tmp_path)) as presence:
        for number in range(1000):
            presence.doing(["rebuild", "productive"][number % 2])
        wait_until(lambda: bool(told(tmp_path)))
        assert len(told(tmp_path)[0]["phases"]) <= presence_module._MOST
        presence.reached = 10**9
        wait_until(lambda: told(tmp_path)[0]["reached"] == 10**9)
        presence.reached = 1
        wait_until(lambda: told(tmp_path)[0]["reached"] == 1)
    folder = ledger_folder(RunDir(tmp_path))
    assert len(folder.read()) == 1 and folder.num_damaged == 0


def test_what_cannot_be_written_is_not_tried_all_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run.json").write_text("{}")
    monkeypatch.setattr(presence_module, "RETRY", 1.0)
    tries = []

    def fails(*_: Any, **__: Any) -> None:
        tries.append(time.monotonic())
        raise OSError("no room")

    monkeypatch.setattr(os, "makedirs", fails)
    with Presence(run_dir=str(tmp_path)):
        wait_until(lambda: len(tries) == 2)
    assert tries[1] - tries[0] >= 1.0


def test_what_was_taken_for_past_is_there_again(tmp_path: Path) -> None:
    """A machine was suspended, and another start has put its line into the ledger."""
    (tmp_path / "run.json").write_text("{}")
    with Presence(run_dir=str(tmp_path)):
        wait_until(lambda: bool(told(tmp_path)))
        os.unlink(next((tmp_path / "agents").iterdir()))
        wait_until(lambda: bool(told(tmp_path)))
    assert told(tmp_path)[0]["ended"]


def test_on_an_object_store_it_is_one_object(s3_url: str) -> None:
    run_dir = RunDir(s3_url)
    run_dir.create(b"{}", "run.json")
    with Presence(run_dir=s3_url):
        wait_until(lambda: bool(told(s3_url)))
        seen = told(s3_url)[0]["to"]
        time.sleep(4 * presence_module.BEAT)
        assert told(s3_url)[0]["to"] == seen, "not ten times a second"
    assert told(s3_url)[0]["to"] > seen and len(run_dir.names("agents")) == 1


@pytest.mark.parametrize("is_back", [True, False])
def test_an_object_store_that_refuses_it_is_said_once(
    is_back: bool, proxy: Proxy, s3_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of what an agent does nobody else can tell; what its workers account for is there, and nobody waits."""
    monkeypatch.setattr(presence_module, "RETRY", 0.1)
    run_dir = RunDir(s3_url)
    run_dir.create(b"{}", "run.json")
    lines = [start(0, 0), node(0, -1), spent(0, 10, 50, [0, 4])]
    run_dir.create("".join(json.dumps(line) + "\n" for line in lines).encode(), "events", "g000000-000000-n000.jsonl")
    proxy.fault = lambda method, path: "403 AccessDenied" if (method, "/agents/" in path) == ("PUT", True) else None
    with Presence(run_dir=s3_url) as presence:
        wait_until(lambda: sum((method, "/agents/" in path) == ("PUT", True) for method, path in proxy.seen) > 2)
        presence.doing("productive")
        assert not told(s3_url)
        if is_back:
            proxy.fault = lambda method, path: None
            wait_until(lambda: bool(told(s3_url)))
    assert caplog.text.count(f"cannot be written to {s3_url} (") == 1, caplog.text
    assert caplog.text.count("what its workers do not tell is missing") == 1
    assert [[cause for cause, _ in line["phases"]] for line in told(s3_url)] == [["startup", "productive"]] * is_back
    found = [one for one in stretches(read_ledger(run_dir)) if one.node == lines[1]["node"]]
    assert [(one.start, one.stop) for one in found] == [(10, 50)]


@pytest.mark.slow
def test_a_run_whose_agent_is_refused_trains_on_and_its_account_is_whole_afterwards(
    tmp_path: Path, proxy: Proxy, s3_url: str
) -> None:
    refused = list[str]()

    def fault(method: str, path: str) -> str | None:
        if method != "PUT" or "/agents/" not in path:
            return None
        refused.append(path)
        return "403 AccessDenied"

    def before() -> None:
        logging.getLogger().handlers.clear()  # pytest's
        forked.install()
        presence_module.STORE_BEAT, presence_module.RETRY = 0.5, 0.2

    proxy.fault = fault
    options = ["--run-dir", s3_url, "--max-steps", "30", "--log-every", "1", "--set", "pace=0.05"]
    run = Command(tmp_path, NET, *options, before=before)
    began = began_at(run.pid)
    run.wait_for(r"step \d+/30")
    wait_until(lambda: len(refused) > 2)
    assert not told(s3_url)
    proxy.fault = lambda method, path: None
    assert run.wait() == 0, run.text
    ended = time.time()
    assert run.text.count("cannot be written to") == 1 and "Traceback" not in run.text, run.text
    assert f"{s3_url} (PermissionError: told to say AccessDenied)" in run.text, run.text
    (line,) = told(s3_url)
    assert line["ended"] and line["reached"] == 30
    found = stretches(read_ledger(RunDir(s3_url)))
    assert found[0].start == pytest.approx(began, abs=0.1) and 0.0 <= ended - found[-1].stop < 5.0
    assert all(before.stop == pytest.approx(after.start, abs=1e-3) for before, after in itertools.pairwise(found))
    assert all(sum(one.seconds.values()) == pytest.approx(one.stop - one.start, abs=1e-3) for one in found)
    assert sum(one.seconds.get("productive", 0.0) for one in found) > 30 * 0.05


# ---- what comes of it ----------------------------------------------------------------------------------------------


def test_before_and_behind_what_workers_tell_is_what_the_agent_did() -> None:
    lines = [start(0, 0), node(0, -1), spent(0, 10, 50, [0, 4])]
    mine = agent(4, 60, ["waiting", 6], ["productive", 20], ["startup", 55], ended=True, reached=4)
    assert nonzero(goodput([*lines, mine])) == {"startup": 2 + 5 + 5, "waiting": 4, "productive": 40}
    assert [(one.start, one.stop) for one in stretches([*lines, mine])] == [
        (4, 6),
        (6, 10),
        (10, 50),
        (50, 55),
        (55, 60),
    ]
    killed = {**mine, "ended": False, "phases": mine["phases"][:-1], "reached": 6}
    assert nonzero(goodput([*lines, killed])) == {"startup": 2, "waiting": 4, "productive": 40 + 10}
    later = [start(1, 5), spent(1, 70, 80, [5, 7], node="b")]
    assert nonzero(goodput([*lines, killed, *later]))["replayed"] == 5, "one step of two that nobody has told"
    assert nonzero(goodput([*lines, mine, {**mine, "to": 58.0}])) == nonzero(goodput([*lines, mine])), "once"


def test_a_node_that_never_trains_is_known_by_its_agent_alone() -> None:
    lines = [start(0, 0), {**node(0, -1), "name": "a"}, spent(0, 10, 50, [0, 4])]
    found = timeline([*lines, agent(12, 40, ["waiting", 14], name="b")])
    assert [(row.label, row.stretches[0].start, row.stretches[-1].stop) for row in found.rows] == [
        ("a", 10, 50),
        ("b", 12, 40),
    ]
    assert nonzero(goodput([*lines, agent(12, 40, ["waiting", 14], name="b")])) == {
        "productive": 40,
        "startup": 2,
        "waiting": 26,
    }
    assert not [mark for mark in found.marks if mark.kind not in ("start",)]


def test_between_two_lives_of_one_name_there_is_nobody() -> None:
    """A container that comes back has the same host name and the same pid."""
    lines = [start(0, 0), node(0, -1), spent(0, 10, 50, [0, 4]), start(1, 4), node(1, 4), spent(1, 710, 720, [4, 5])]
    lives = [agent(5, 52, ["productive", 10]), agent(700, 730, ["productive", 708], ["startup", 721], ended=True)]
    assert nonzero(goodput([*lines, *lives])) == {"startup": 5 + 10, "unknown": 2 + 10, "productive": 50}
    assert nonzero(goodput(lines))["unknown"] == 660


def test_the_end_of_workers_is_short() -> None:
    lines = [start(0, 0), node(0, -1), spent(0, 10, 50, [0, 4])]
    for seconds, cause in ((9, "startup"), (400, "unknown")):
        line = agent(10, 50 + seconds, ["productive", 10], ended=True, reached=4)
        assert nonzero(goodput([*lines, line])) == {"productive": 40, cause: seconds}


def test_a_node_that_was_lost_went_on_until_then() -> None:
    who = {"host": "a", "agent_pid": 7}
    lines = [start(0, 0), {**node(0, -1), **who}, spent(0, 10, 50, [0, 4]), spent(0, 10, 50, [0, 4], node="b")]
    gone = {"event": "gone", "generation": 1, "node": "b", "time": 57.0, **who}
    assert is_sound(gone)
    again = [start(1, 4), node(1, 4, "b"), spent(1, 50, 60, [4, 5], node="b")]
    assert goodput([*lines, gone, *again]).total == 47 + 50
    assert goodput([*lines, agent(10, 53), gone, *again]).total == 47 + 50
    assert goodput([*lines, agent(10, 59, ended=True), gone, *again]).total == 49 + 50, "it left in good order"
    assert goodput([*lines, agent(10, 55, ended=True), gone, *again]).total == 45 + 50
    assert goodput([*lines, agent(10, 53, beat=0.5), gone, *again]).total == 43.5 + 50, "it would have spoken again"


def test_a_run_that_is_silent_is_not_heard_by_its_agents(tmp_path: Path) -> None:
    lines = [start(0, 0), spent(0, 10, 50, [0, 4]), agent(4, 9999.0)]
    assert status(lines, now=10_000.0)["state"] == "silent" and status(lines, now=10_000.0)["seen"] == 50


def test_what_earlier_starts_spent_has_those_that_are_gone() -> None:
    earlier = [start(0, 0), node(0, -1), spent(0, 10, 50, [0, 4]), agent(8, 53, ["productive", 20])]
    living = [agent(52, 999, name="b"), agent(40, 61, ["waiting", 41], name="c")]  # the one trains, the other stands by
    begun = [{**node(1, -1, "b"), "time": 60.0}, spent(1, 52, 52, [4, 4], node="b")]
    begun[1]["seconds"] = {}
    lines = [*earlier, *living, start(1, 4), *begun, spent(1, 60, 70, [4, 6], node="b")]
    assert spent_before(lines, begun).total == 2 + 40 + 3 + (60 - 40), "who stands by does so until now"


def test_many_agents_become_one_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_module, "_MANY", 4)
    run_dir, now = RunDir(tmp_path), time.time()
    run_dir.create(b"", "events", "g000000-000000-n000.jsonl")
    for number in range(6):
        line = agent(now - 50, now - 20, name=f"n{number}", ended=number > 0)  # the first one may still live
        run_dir.create(json.dumps(line).encode() + b"\n", "agents", f"n{number}.jsonl")
    before = goodput(read_ledger(run_dir)).seconds
    fold_agents(run_dir, 1)
    assert run_dir.names("agents") == ["n0.jsonl"] and run_dir.names("events")[-1] == "g000001-000000-agents.jsonl"
    assert goodput(read_ledger(run_dir)).seconds == pytest.approx(before)
    run_dir.create(
        json.dumps(told(tmp_path)[0]).encode() + b"\n", "agents", "again.jsonl"
    )  # as after a crash in between
    assert goodput(read_ledger(run_dir)).seconds == pytest.approx(before)
    fold_agents(run_dir, 2)
    assert run_dir.names("agents") == ["again.jsonl", "n0.jsonl"], "few stay as they are"
