"""One job at a time in a run directory: real processes, real signals, a real S3 server."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from elastictrain import CheckpointConfig, Trainer, UsageError
from elastictrain.checkpoint import lease as module
from elastictrain.checkpoint.lease import Holder, Lease
from elastictrain.errors import CheckpointError
from elastictrain.rundir import RunDir
from tests.helpers import run_ranks
from tests.trainer.tasks import Recorded

BRIEF = 0.5  # of silence, where nobody is there who could break it

HOLD = """
import sys, time
from elastictrain.checkpoint import lease
lease.BEAT = 0.05
held = lease.Lease(lease.RunDir(sys.argv[1]), job=sys.argv[2], say=print)
held.take()
print("held", flush=True)
while held.lost is None:
    time.sleep(0.02)
print(held.lost, flush=True)
"""


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SILENCE", 3.0)
    monkeypatch.setattr(module, "BEAT", 0.05)


def _lease(url: Any, job: str) -> tuple[Lease, list[str]]:
    said: list[str] = []
    return Lease(RunDir(url), job=job, say=said.append), said


def _hold(url: Any, job: str) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(url), job], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def _names(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "lease").iterdir())


def test_released_and_taken_again(tmp_path: Path) -> None:
    for number in range(3):
        held, said = _lease(tmp_path, f"job {number}")
        held.take()
        time.sleep(0.2)
        assert re.fullmatch(rf"(00000{number}.beat-\d+ ){{1,2}}00000{number}.json", " ".join(_names(tmp_path)))
        held.release()
        assert not said
    assert _names(tmp_path)[-1] == "000002.released"
    assert json.loads((tmp_path / "lease" / "000002.json").read_text())["pid"] == os.getpid()


@pytest.mark.parametrize("storage", ["local", "s3"])
def test_another_job_is_refused_while_the_first_lives(
    storage: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    url = str(tmp_path) if storage == "local" else request.getfixturevalue("s3_url")
    first = _hold(url, "first")
    try:
        second, said = _lease(url, "second")
        with pytest.raises(UsageError) as refused:
            second.take()
        expected = (
            rf"run directory .* is in use by process {first.pid} on .* \(since .*\): .*stop that job first, or choose"
        )
        assert re.match(expected, str(refused.value), re.DOTALL)
        assert len(said) == 1 and "for a sign of life" in said[0]
        again, said = _lease(url, "first")  # its next generation
        again.take()
        assert not said
        assert first.stdout is not None and "was taken over by" in first.stdout.readline()
        again.release()
    finally:
        first.kill()
        first.wait()


def test_a_killed_process_of_this_machine_is_known_to_be_gone(tmp_path: Path) -> None:
    first = _hold(tmp_path, "first")
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    started = time.monotonic()
    second, said = _lease(tmp_path, "second")
    second.take()
    assert time.monotonic() - started < module.SILENCE and not said
    second.release()


@pytest.mark.slow
def test_a_dead_machine_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SILENCE", BRIEF)
    first = _hold(tmp_path, "first")
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    monkeypatch.setattr(module, "_machine", lambda: "another one")
    second, said = _lease(tmp_path, "second")
    started = time.monotonic()
    second.take()
    assert time.monotonic() - started >= module.SILENCE and len(said) == 1 and second.lost is None
    second.release()


@pytest.mark.slow
def test_a_frozen_job_learns_that_it_has_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SILENCE", BRIEF)
    first = _hold(tmp_path, "first")
    try:
        os.kill(first.pid, signal.SIGSTOP)
        second, said = _lease(tmp_path, "second")
        second.take()
        assert len(said) == 1
        os.kill(first.pid, signal.SIGCONT)
        assert first.stdout is not None
        line = first.stdout.readline()
        assert f"was taken over by process {os.getpid()} on" in line and "it ends here, the other one goes on" in line
        assert first.wait(10) == 0
        assert second.lost is None
        second.release()
    finally:
        first.kill()
        first.wait()


class Robbed(Recorded):
    """Another job takes the directory while rank 0 computes step 3; the others know nothing of it."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        lease = self.trainer._session.lease
        if lease is not None and self.global_step == 2 and lease.lost is None:
            other, _ = _lease(lease._run_dir.path, lease._job)
            other.take()
            deadline = time.monotonic() + 60
            while lease.lost is None and time.monotonic() < deadline:
                time.sleep(0.01)
            other.release()
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("world_size", "log_every", "every_steps", "last"),
    [
        (1, 50, None, 3),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [(2, 5, None, 5), (2, 50, 4, 4), (2, 50, None, 6)]),
    ],
)
def test_who_has_lost_ends_on_all_ranks_where_they_next_meet(
    world_size: int, log_every: int, every_steps: int | None, last: int, tmp_path: Path
) -> None:
    """On a log step, at a save, or at the end; one process at once. It saves nothing any more."""

    def fit(rank: int, world_size: int) -> tuple[int, str]:
        config = CheckpointConfig(every_steps=every_steps, every_seconds=None)
        task = Robbed()
        trainer = Trainer(
            run_dir=str(tmp_path), max_steps=6, global_batch_size=24, log_every=log_every, checkpoint=config
        )
        with pytest.raises(UsageError) as lost:
            trainer.fit(task)
        return task.trainer._session.counters.step, str(lost.value)

    texts = run_ranks(fit, world_size, timeout=120)
    assert len(set(texts)) == 1 and texts[0][0] == last
    assert re.fullmatch(r"run directory .* was taken over by .*: it ends here, the other one goes on", texts[0][1])
    assert "000000.released" not in _names(tmp_path)
    assert not (tmp_path / "checkpoints").exists()


def test_of_two_at_the_same_moment_the_second_goes_on(tmp_path: Path) -> None:
    """Where the store has no conditional put."""
    held, _ = _lease(tmp_path, "one")
    held.take()
    file = tmp_path / "lease" / "000000.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "job": "two", "host": "elsewhere"}))
    deadline = time.monotonic() + 10
    while held.lost is None and time.monotonic() < deadline:
        time.sleep(0.02)
    assert held.lost is not None and "elsewhere" in held.lost and "at the same moment: this job ends here" in held.lost
    held.release()


def test_a_process_that_is_hidden_is_not_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    def kill(pid: int, number: int) -> None:
        raise error

    mine = Holder.me("one")
    hidden = dataclasses.replace(mine, pid=2**22 + 1)  # more than there can be
    assert not mine.is_gone and hidden.is_gone
    error: OSError = PermissionError(1, "not yours")
    monkeypatch.setattr(os, "kill", kill)
    assert not hidden.is_gone


@pytest.mark.parametrize("name", ["file_sizes", "read"])
def test_storage_that_does_not_answer_is_one_line(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no usage error: workers that are started again may be luckier."""

    def refuse(*args: Any) -> Any:
        raise PermissionError(13, "Access Denied")

    monkeypatch.setattr(module if name == "file_sizes" else RunDir, name, refuse)
    with pytest.raises(CheckpointError, match=r"run dir.* cannot be used \(PermissionError: .*Access Denied\): check"):
        Trainer(run_dir=str(tmp_path), max_steps=1, global_batch_size=4).fit(Recorded())


def test_of_many_who_want_it_one_gets_it(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    many = [
        subprocess.Popen([*command, f"job {i}"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for i in range(6)
    ]
    try:
        deadline = time.monotonic() + 30
        while sum(process.poll() is not None for process in many) < 5:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        (winner,) = (process for process in many if process.poll() is None)
        assert winner.stdout is not None and "held" in winner.stdout.readline()
        for process in many:
            if process is not winner:
                assert "is in use by process" in process.communicate()[1]
    finally:
        for process in many:
            process.kill()
            process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("content", ["", '{"pid": 3}'])
def test_a_holder_that_cannot_be_read_is_waited_for(
    content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SILENCE", BRIEF)
    (tmp_path / "lease").mkdir()
    (tmp_path / "lease" / "000004.json").write_text(content)
    (tmp_path / "lease" / "something else").write_text("")
    held, said = _lease(tmp_path, "one")
    held.take()
    assert len(said) == 1 and "000005.json" in _names(tmp_path)
    held.release()


def test_a_store_that_fails_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    held, _ = _lease(tmp_path, "one")
    held.take()
    for file in (tmp_path / "lease").iterdir():
        file.unlink()
    (tmp_path / "lease").rmdir()
    (tmp_path / "lease").write_text("no folder any more")
    time.sleep(0.5)
    held.release()
    assert caplog.text.count("no sign of life in") == 1
    assert "could not be released" in caplog.text
