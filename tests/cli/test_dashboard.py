"""``elastictrain dashboard`` with a real TensorBoard: what it serves, and that nothing is left of it."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from elastictrain.cli.main import _main
from tests.helpers import ROOT, free_port, heed_ctrl_c
from tests.metrics.test_mirror import write

PATIENCE = 120.0


@contextmanager
def dashboard(folder: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command, and the address that it prints."""
    command = [sys.executable, "-c", "from elastictrain.cli.main import main; main()", "dashboard", *arguments]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(folder / "cache"), "TMPDIR": str(folder)}
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(
            [*command, "--no-open"],
            env=env,
            stdout=subprocess.PIPE,
            stderr=output,
            text=True,
            start_new_session=True,
            preexec_fn=heed_ctrl_c,
        )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.fullmatch(r"elastictrain: .* at (http://127\.0\.0\.1:\d+/#\w+) \(Ctrl-C ends it\)\n", line)
        assert found is not None, (line, (folder / "output").read_text())
        yield process, found[1]
    finally:
        process.kill()
        process.wait()


def scalars(address: str, run: str, tag: str) -> list[tuple[int, float]]:
    query = urllib.parse.urlencode({"run": run, "tag": tag})
    base = address.split("#")[0]
    try:
        with urllib.request.urlopen(f"{base}data/plugin/scalars/scalars?{query}", timeout=10) as answer:
            return [(step, value) for _, step, value in json.loads(answer.read())]
    except OSError:  # not loaded yet
        return []


def wait_for(what: Any, wanted: Any) -> None:
    deadline = time.monotonic() + PATIENCE
    while (found := what()) != wanted:
        assert time.monotonic() < deadline, found
        time.sleep(0.1)


def descendants(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in children] + [pid for child in children for pid in descendants(int(child))]


def are_gone(pids: list[int]) -> bool:
    return not any(Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_text() for pid in pids)


@pytest.mark.slow
def test_a_folder_of_runs_until_ctrl_c(tmp_path: Path) -> None:
    for name, value in (("one", 1.0), ("two", 2.0)):
        write(str(tmp_path / "runs" / name), generation=0, start=0, stop=3, value=value)
    port = free_port()
    options = ["--port", str(port), "--tab", "timeseries"]
    with dashboard(tmp_path, str(tmp_path / "runs"), *options) as (process, address):
        assert address == f"http://127.0.0.1:{port}/#timeseries"
        for name, value in (("one", 1.0), ("two", 2.0)):
            wanted = [(step, value) for step in (1, 2, 3)]
            wait_for(lambda name=name: scalars(address, name, "train/loss"), wanted)
        children = descendants(process.pid)
        assert children
        os.killpg(process.pid, signal.SIGINT)  # what a terminal does
        assert process.wait(PATIENCE) == 0
        wait_for(lambda: are_gone(children), True)
    assert (tmp_path / "output").read_text() == ""
    assert not list(tmp_path.glob("elastictrain-dashboard-*"))


@pytest.mark.slow
def test_a_run_on_s3_is_followed_and_nothing_outlives_a_killed_command(s3_url: str, tmp_path: Path) -> None:
    write(s3_url, generation=0, start=0, stop=2, value=1.0)
    with dashboard(tmp_path, s3_url, "--port", str(free_port()), "--x-axis", "samples") as (process, address):
        assert address.endswith("/#custom_scalars")
        wait_for(lambda: scalars(address, "run", "train/loss"), [(8, 1.0), (16, 1.0)])
        write(s3_url, generation=1, start=1, stop=3, value=2.0)
        wait_for(lambda: scalars(address, "run", "train/loss"), [(8, 1.0), (16, 2.0), (24, 2.0)])
        children = descendants(process.pid)
        process.kill()
        wait_for(lambda: are_gone(children), True)


def test_what_cannot_be_shown_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _main(["dashboard", str(tmp_path / "missing")]) == 2
    assert _main(["dashboard", str(tmp_path)]) == 2
    assert _main(["dashboard", "gopher://somewhere/run"]) == 2
    assert _main(["dashboard", str(tmp_path), "--tab", "weather"]) == 2
    write(str(tmp_path / "run"), generation=0, start=0, stop=1, value=1.0)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert _main(["dashboard", str(tmp_path / "run"), "--port", str(port)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 5
    assert lines[0].endswith(f"{tmp_path}/missing holds no run: give a run's directory, or a folder of such")
    assert lines[1].endswith(f"{tmp_path} holds no run: give a run's directory, or a folder of such")
    assert "unknown URL scheme gopher://" in lines[2]
    assert "'weather'" in lines[3]
    wanted = f"port {port} of 127.0.0.1 cannot be used (Address already in use): give another --port or --host"
    assert lines[4].endswith(wanted)
