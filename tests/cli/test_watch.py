"""``elastictrain status --watch``: it looks again, ends with the run or with Ctrl-C, and in both cases in good order."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from elastictrain.channel import key_of
from elastictrain.checkpoint.token import make_token, read_token
from elastictrain.cli import status as status_module
from elastictrain.cli.main import _main
from elastictrain.elastic.chain import Entry, Generation, Loss, Member, Size
from elastictrain.elastic.runlog import RunLog
from elastictrain.metrics.ledger import Ledger
from elastictrain.rundir import RunDir
from tests.helpers import ROOT, heed_ctrl_c
from tests.reports.made import BEGAN, Made

TOO_LONG = 60.0
COMMAND = [
    sys.executable,
    "-c",
    "from elastictrain.cli.main import main; main()",
    "status",
    "--watch",
    "--interval",
    "0.1",
]


def running(path: Path) -> Made:
    """A run that has written something a moment ago."""
    made = Made(path, now=time.time() - 18.0).run(["node-1-11"], until=20)
    made.write()
    return made


def more(made: Made, outcome: str | None = None) -> None:
    """Steps go on, as a segment more; or the run ends."""
    if outcome is not None:
        Ledger(RunDir(made.path), generation=made.generation).ended(step=made.step, outcome=outcome)
        return
    before = len(made.events)
    made.go_on(["node-1-11"], 10)
    text = "".join(json.dumps(line) + "\n" for line in made.events[before:])
    (made.path / "events" / f"g{made.generation:06d}-{made.step:06d}-n000.jsonl").write_text(text)


def test_nodes_that_leave_and_come_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Who is there is who takes part in the newest start; what is lost is of all nodes and all starts."""
    four = ["node-1-11", "node-2-12", "node-3-13", "node-10-14"]
    made = Made(tmp_path).run(four, until=137)
    made.run([*four[:2], four[3]], until=220, resumed=100, cause="node-3 was killed by SIGKILL at step 137")

    def told() -> dict[str, Any]:
        made.write()
        assert _main(["status", str(tmp_path), "--json"]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    three = told()
    assert (three["generation"], three["world_size"], three["mesh"]) == (1, 6, "dp_replicate=6")
    assert sorted(node["name"] for node in three["nodes"]) == ["node-1", "node-10", "node-2"]
    assert sorted(one["rank"] for node in three["nodes"] for one in node["workers"]) == list(range(6))
    assert three["goodput"]["total_seconds"] == pytest.approx(3 * (made.now - BEGAN) + 76.5, abs=1e-3)
    made.run([*four[:2], "node-3-99", four[3]], until=400).end()
    again = told()
    assert (again["state"], again["step"], again["world_size"], len(again["nodes"])) == ("finished", 400, 8, 4)
    (recovery,) = again["recoveries"]
    assert (recovery["from_step"], recovery["resumed_step"], recovery["lost_steps"]) == (137, 100, 37)
    assert again["goodput"]["lost_seconds"]["replayed"] == pytest.approx(4 * 37 * 0.5, rel=0.1), (
        "without waits for data"
    )
    assert _main(["status", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert out.count("  node: node-") == 4 and "recovery: node-3 was killed by SIGKILL at step 137; 37 steps" in out


def test_the_run_log_adds_the_size_and_who_is_kept_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    running(tmp_path)

    def told(*more: str) -> str:
        assert _main(["status", str(tmp_path), *more]) == 0
        return capsys.readouterr().out

    assert "size" not in json.loads(told("--json"))
    place = RunDir(tmp_path)
    make_token(place)
    here, gone = Member("a-1-b", "10.0.0.1", 1), Member("c-2-d", "10.0.0.2", 1)
    losses = (Loss("10.0.0.1", 2, 10.0), Loss("10.0.0.2", 3, 600.0), Loss("10.0.0.3", 1, 0.0))
    first = Entry().claimed_by(here, Size(1, 4))
    run_log = RunLog(place, key_of(read_token(place)), folder="log-j")
    for entry in (first, first.with_generation(Generation(1, 1, (here, gone)), ())):
        assert run_log.create(entry)
    assert json.loads(told("--json", "--rdzv-id", "j"))["kept_out"] == []
    second = entry.with_generation(Generation(2, 1, (here,), size=Size(1, 4)), losses)
    assert run_log.create(second)
    found = json.loads(told("--json", "--rdzv-id", "j"))
    assert found["size"] == {"min": 1, "max": 4}
    (kept_out,) = found["kept_out"]
    assert (kept_out["host"], kept_out["losses"]) == ("10.0.0.2", 3)
    assert time.time() < kept_out["until"] <= time.time() + 600.0
    out = told("--rdzv-id", "j")
    assert re.search(
        r"  size: 1:4 nodes\n  kept out: 10.0.0.2, lost 3 times in short, for another (9m\d\ds|10m00s)\n", out
    )
    with monkeypatch.context() as later:
        later.setattr(status_module.time, "time", lambda: kept_out["until"] + 1.0)
        assert json.loads(told("--json", "--rdzv-id", "j"))["kept_out"] == [], "that was long ago"
    assert "size" not in told(), "that is another run"
    (tmp_path / "log-j" / "00000003").write_text("{}")
    assert "size" not in told("--rdzv-id", "j"), "nobody with the token has written it"


def test_it_ends_with_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = running(tmp_path)
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        more(made, "finished" if len(slept) == 3 else None)

    monkeypatch.setattr(status_module.time, "sleep", sleep)
    assert _main(["status", str(tmp_path), "--watch", "--json", "--interval", "7"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(one["step"], one["state"]) for one in found] == [
        (20, "running"),
        (30, "running"),
        (40, "running"),
        (40, "finished"),
    ]
    assert slept == [7.0] * 3


def test_it_goes_on_while_nodes_come_and_go(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = running(tmp_path)
    steps = [lambda: more(made, "change"), lambda: (made.run(["node-1-11", "node-2-12"], until=30), made.write())]
    steps.append(lambda: more(made, "finished"))
    monkeypatch.setattr(status_module.time, "sleep", lambda seconds: steps.pop(0)())
    assert _main(["status", str(tmp_path), "--watch", "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(one["state"], one["generation"]) for one in found] == [
        ("running", 0),
        ("changing", 0),
        ("running", 1),
        ("finished", 1),
    ]


def test_storage_that_does_not_answer_is_tried_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = running(tmp_path)
    names = RunDir.names
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        is_down = len(slept) == 1
        monkeypatch.setattr(RunDir, "names", gone if is_down else names)
        if not is_down:
            more(made, "preempt")

    def gone(run_dir: RunDir, *parts: str) -> list[str]:
        raise OSError("gone")

    monkeypatch.setattr(status_module.time, "sleep", sleep)
    assert _main(["status", str(tmp_path), "--watch"]) == 0
    out = capsys.readouterr().out
    assert out.count("cannot be read now (OSError: gone); tried again") == 1
    assert [line.split(":")[0] for line in out.splitlines() if ": step 20, generation 0" in line] == [
        "running",
        "running",
        "preempted",
    ]
    monkeypatch.setattr(RunDir, "names", gone)
    assert _main(["status", str(tmp_path), "--watch"]) == 2, "but not where it has never been seen"
    assert _main(["status", str(tmp_path), "--watch", "--interval", "0"]) == 2


@pytest.mark.slow
@pytest.mark.parametrize("is_terminal", [False, True])
def test_ctrl_c_ends_it_in_good_order(tmp_path: Path, is_terminal: bool) -> None:
    made = running(tmp_path)
    mine, theirs = pty.openpty() if is_terminal else os.pipe()
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "40"}
    process = subprocess.Popen(
        [*COMMAND, str(tmp_path)],
        cwd=ROOT,
        env=env,
        stdout=theirs,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=heed_ctrl_c,
    )
    os.close(theirs)
    text = ""

    def wait_for(pattern: str) -> None:
        nonlocal text
        deadline = time.monotonic() + TOO_LONG
        while not re.search(pattern, text):
            assert time.monotonic() < deadline and process.poll() is None, text
            text += os.read(mine, 65536).decode(errors="replace")

    try:
        wait_for(r"running: step 20, generation 0")
        more(made)
        wait_for(r"running: step 30, generation 0")
        process.send_signal(signal.SIGINT)
        assert process.wait(TOO_LONG) == 0
        assert process.stderr is not None and process.stderr.read() == b""
        assert ("\x1b[" in text) == is_terminal, "a terminal's lines are written over"
    finally:
        process.kill()
        process.wait()
        os.close(mine)
