"""Metrics and event files on an object store: few objects, no more bytes than on a disk, and a store that goes away."""

from __future__ import annotations

import time
import uuid
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from elastictrain.metrics import courier
from elastictrain.metrics import ledger as ledger_module
from elastictrain.metrics.goodput import TimeBook
from elastictrain.metrics.ledger import Ledger, read_ledger
from elastictrain.metrics.mirror import copy_new
from elastictrain.metrics.record import Recorder
from elastictrain.rundir import RunDir
from tests.checkpoint.proxy import Proxy
from tests.records import read_records

STEPS, NAMES = 10_000, [f"train/metric_{i:02d}" for i in range(20)]


class Clock:
    """A run's time, which goes on by a second with every step."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    sleep = staticmethod(time.sleep)
    time = monotonic


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (courier, ledger_module):
        monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture(autouse=True)
def one_try(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of botocore's, and two of s3fs's; else what lasts takes a minute."""
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setattr(pytest.importorskip("s3fs").S3FileSystem, "retries", 2)


def train(recorder: Recorder, clock: Clock, steps: range, *, waits: bool = True, ledger: Ledger | None = None) -> None:
    """Log as a training loop does whose steps take a second; what is due is written before it goes on."""
    book = TimeBook()
    if ledger is not None:
        about = {"name": "n", "host": "n", "agent_pid": 1, "workers": []}
        ledger.started(step=0, world_size=1)
        ledger.opened(book, step=0, reached=-1, **about)
    for step in steps:
        clock.now += 1.0
        recorder.log(step, 8 * step, {name: step / (i + 1) for i, name in enumerate(NAMES)}, epoch=0)
        if ledger is not None:
            ledger.account(book, step=step, samples=8 * step, tokens=0)
        couriers = [recorder] if ledger is None else [recorder, ledger._courier]
        while waits and any(one._served < one._asked for one in couriers):
            time.sleep(0.001)


def size_of(run_dir: RunDir) -> int:
    return sum(run_dir.fs.size(path) for path in run_dir.fs.find(run_dir.path))


def check(run_dir: RunDir, copy: Path, steps: list[int]) -> None:
    """Every step is there once, in both."""
    assert [line["step"] for line in read_records(run_dir, replayed=True)] == steps
    copy_new(run_dir, copy, "tensorboard")
    accumulator = EventAccumulator(str(copy / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    for name in (NAMES[0], NAMES[-1]):
        assert [event.step for event in accumulator.Scalars(name)] == steps


@pytest.mark.slow
def test_a_run_of_three_hours_leaves_few_objects_and_uploads_once(
    s3_url: str, proxy: Proxy, clock: Clock, tmp_path: Path
) -> None:
    run_dir = RunDir(s3_url)
    beside = RunDir(f"memory://store-test/{uuid.uuid4().hex}")  # as long a ledger, without its two hundred requests
    recorder, ledger = Recorder(run_dir, generation=0, start_step=0), Ledger(beside, generation=0, node="n")
    train(recorder, clock, range(1, STEPS + 1), ledger=ledger)
    recorder.close()
    ledger.close()
    objects, of_ledger = run_dir.fs.find(run_dir.path), beside.names("events")
    accounts = [line["steps"][1] for line in read_ledger(beside) if line["event"] == "time"]
    beside.fs.rm(beside.path, recursive=True)
    uploads = [path for method, path in proxy.seen if method == "PUT"]
    assert 50 < len(objects) < 200 - len(of_ledger), "all that there is under the run directory"
    assert len(uploads) == len(objects)
    assert accounts[-1] >= STEPS - 60

    clock.now = 0.0
    local = Recorder(RunDir(tmp_path / "local"), generation=0, start_step=0)
    train(local, clock, range(1, STEPS + 1), waits=False)
    local.close()
    size = size_of(RunDir(tmp_path / "local"))
    print(
        f"{len(objects)} objects and {len(of_ledger)} of the ledger; {proxy.uploaded} bytes uploaded, {size} on a disk"
    )
    assert size < proxy.uploaded < 1.3 * size
    assert [line["step"] for line in read_records(run_dir, replayed=True)] == list(range(1, STEPS + 1))


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["cut", "lost"])
def test_a_store_that_goes_away_loses_nothing_and_stops_nobody(
    s3_url: str, proxy: Proxy, clock: Clock, tmp_path: Path, fault: str
) -> None:
    recorder = Recorder(RunDir(s3_url), generation=0, start_step=0)
    train(recorder, clock, range(1, 101))
    before = recorder._served
    proxy.fault = lambda method, path: fault if fault != "lost" or method == "PUT" else "cut"
    train(recorder, clock, range(101, 201), waits=False)  # the store is back only when training has gone on without it
    deadline = time.monotonic() + 60
    while recorder._served == before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert recorder._written <= before < recorder._served, "it was tried, in vain"
    proxy.fault = lambda method, path: None
    train(recorder, clock, range(201, 301))
    recorder.close()
    check(RunDir(s3_url), tmp_path, list(range(1, 301)))


@pytest.mark.slow
def test_a_store_that_comes_back_when_the_run_ends(
    s3_url: str, proxy: Proxy, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last values go out too: closing tries again until its time is over."""
    monkeypatch.setattr(courier, "time", time)
    refusals: list[Any] = []

    def fault(method: str, path: str) -> str | None:
        refusals.append(path)
        return "503" if len(refusals) < 6 else None

    recorder = Recorder(RunDir(s3_url), generation=0, start_step=0)
    for step in range(1, 11):
        recorder.log(step, step, dict.fromkeys(NAMES, 1.0), epoch=0)
    proxy.fault = fault
    recorder.close(timeout=60.0)
    check(RunDir(s3_url), tmp_path, list(range(1, 11)))
