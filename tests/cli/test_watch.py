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

import pytest

from elastictrain.cli import status as status_module
from elastictrain.cli.main import _main
from elastictrain.metrics.ledger import Ledger
from elastictrain.rundir import RunDir
from tests.helpers import ROOT
from tests.reports.made import Made

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
    made._some_steps(["node-1-11"], 10)
    text = "".join(json.dumps(line) + "\n" for line in made.events[before:])
    (made.path / "events" / f"g{made.generation:06d}-{made.step:06d}-n000.jsonl").write_text(text)


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
        [*COMMAND, str(tmp_path)], cwd=ROOT, env=env, stdout=theirs, stderr=subprocess.PIPE, start_new_session=True
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
