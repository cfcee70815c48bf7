from __future__ import annotations

import json
import logging
import math
import re
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elastictrain.metrics import record as record_module
from elastictrain.metrics.panels import Markdown, Panel
from elastictrain.metrics.record import MOST_CARRIED, Recorder, encode_line
from elastictrain.rundir import RunDir
from tests.records import read_records


def lines(folder: Path) -> list[dict[str, Any]]:
    def refuse(token: str) -> float:
        raise AssertionError(f"{token} is not JSON")

    texts = [path.read_text() for path in sorted(folder.glob("metrics/*.jsonl"))]
    return [json.loads(line, parse_constant=refuse) for text in texts for line in text.splitlines()]


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[Recorder]:
    recorder = Recorder(RunDir(tmp_path), generation=3, start_step=0, tensorboard=False)
    yield recorder
    recorder.close()


def test_a_line_has_the_fields_of_the_contract(tmp_path: Path, recorder: Recorder) -> None:
    before = time.time()
    recorder.log(10, 240, {"train/loss": 2.5, "lr": 1e-3}, epoch=1)
    recorder.close()
    (line,) = lines(tmp_path)
    assert before - 1e-3 <= line.pop("time") <= time.time()
    assert line == {"step": 10, "samples": 240, "generation": 3, "epoch": 1, "train/loss": 2.5, "lr": 1e-3}


def test_segments_are_new_objects_with_names_that_sort(tmp_path: Path, recorder: Recorder) -> None:
    for step in range(1, 13):
        recorder.log(step, step, {"a": step}, epoch=0)
        assert recorder.flush(wait=10)
    names = sorted(path.name for path in (tmp_path / "metrics").iterdir())
    assert names == [f"g000003-{sequence:06d}.jsonl" for sequence in range(12)]
    assert [line["step"] for line in lines(tmp_path)] == list(range(1, 13))


def test_nothing_is_written_before_something_is_logged(tmp_path: Path, recorder: Recorder) -> None:
    assert recorder.flush(wait=10)
    recorder.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("first", "second"), [(0, 1), (0, 0), (4, 0)])
def test_a_later_process_writes_after_what_is_there(tmp_path: Path, first: int, second: int) -> None:
    for generation in (first, second):
        recorder = Recorder(RunDir(tmp_path), generation=generation, start_step=0)
        for step in (1, 2):
            recorder.log(step, step, {"a": float(step)}, epoch=0)
            recorder.flush(wait=10)
        recorder.close()
    assert [line["generation"] for line in lines(tmp_path)] == [first, first, second, second]
    events = sorted(path.name for path in (tmp_path / "tensorboard").iterdir())
    assert len(events) == 2 and all(re.fullmatch(r"events\.out\.tfevents\.g\d{6}-\d{6}", name) for name in events)


def test_numbers_that_json_has_no_word_for_stay_valid_json(tmp_path: Path, recorder: Recorder) -> None:
    recorder.log(1, 1, {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 1.5}, epoch=0)
    recorder.log(2, 2, {"a": 0.5, "b": 1.0, "c": 2.0, "d": 2.5}, epoch=0)
    recorder.close()
    first = lines(tmp_path)[0]
    assert [first[name] for name in "abcd"] == ["NaN", "Infinity", "-Infinity", 1.5]

    back = read_records(RunDir(tmp_path))[0]
    assert math.isnan(back["a"]) and back["b"] == math.inf and back["c"] == -math.inf

    pandas = pytest.importorskip("pandas")
    frame = pandas.read_json(next(tmp_path.glob("metrics/*.jsonl")), lines=True)
    assert [str(frame[name].dtype) for name in "abcd"] == ["float64"] * 4
    assert math.isnan(frame["a"][0]) and frame["b"][0] == math.inf and frame["c"][0] == -math.inf


def test_a_value_named_like_a_field_does_not_hide_it(tmp_path: Path, recorder: Recorder) -> None:
    recorder.log(7, 70, {"step": 0.25, "epoch": 9.0}, epoch=1)
    recorder.close()
    (line,) = lines(tmp_path)
    assert (line["step"], line["epoch"], line["value/step"], line["value/epoch"]) == (7, 1, 0.25, 9.0)


def test_what_is_no_number_is_left_out_and_said_once(
    tmp_path: Path, recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    numpy = pytest.importorskip("numpy")
    values: dict[str, Any] = {"text": "high", "huge": 10**400, "flag": True, "scalar": numpy.float32(0.5), "count": 3}
    for step in (1, 2):
        recorder.log(step, step, values, epoch=0)
    recorder.close()
    assert [set(line) - {"step", "samples", "time", "generation", "epoch"} for line in lines(tmp_path)] == [
        {"flag", "scalar", "count"}
    ] * 2
    assert [record.getMessage() for record in caplog.records] == [
        "text is a str and not a number: it is not recorded",
        "huge is a int and not a number: it is not recorded",
    ]


def test_rolled_back_steps_are_read_once(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    for generation, start, stop in [(0, 0, 90), (1, 60, 80), (1, 70, 110)]:
        recorder = Recorder(run_dir, generation=generation, start_step=start, tensorboard=False)
        for step in range(start + 10, stop + 1, 10):
            recorder.log(step, step, {"train/loss": generation + step / 1000 + start}, epoch=0)
            if step % 20 == 0:
                recorder.log(step, step, {"val/loss": 1.0}, epoch=0)
        recorder.close()
    assert len(read_records(run_dir, replayed=True)) == 9 + 4 + 2 + 1 + 4 + 2
    kept = read_records(run_dir)
    train = [(line["step"], line["generation"]) for line in kept if "train/loss" in line]
    assert train == [(step, 0) for step in range(10, 70, 10)] + [(step, 1) for step in range(70, 111, 10)]
    assert [line["train/loss"] for line in kept if "train/loss" in line][-1] == pytest.approx(71.11)
    assert [line["step"] for line in kept if "val/loss" in line] == [20, 40, 60, 80, 100]


def test_a_line_cut_by_a_crash_is_left_out(tmp_path: Path, recorder: Recorder) -> None:
    for step in (1, 2):
        recorder.log(step, step, {"a": 1.0}, epoch=0)
    recorder.close()
    (path,) = tmp_path.glob("metrics/*.jsonl")
    path.write_bytes(path.read_bytes()[:-9])
    assert [line["step"] for line in read_records(RunDir(tmp_path))] == [1]


def test_it_writes_by_itself_when_time_has_passed(tmp_path: Path, recorder: Recorder) -> None:
    deadline, step = time.monotonic() + 10, 0
    while not lines(tmp_path) and time.monotonic() < deadline:
        step += 1
        recorder.log(step, step, {"a": 1.0}, epoch=0)
        time.sleep(0.05)
    assert step * 0.05 > 1.5, "flushed too early"
    assert lines(tmp_path)


def test_a_store_that_refuses_is_said_once_and_loses_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = tmp_path / "run"
    root.write_text("a file where the folder should be")  # refuses root, too, which permissions do not
    recorder = Recorder(RunDir(root), generation=0, start_step=0)
    for step in range(1, 6):
        recorder.log(step, step, {"a": float(step)}, epoch=0)
        assert not recorder.flush(wait=10)
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]  # metrics, events
    assert "metrics cannot be written" in caplog.text and "TensorBoard events cannot be written" in caplog.text

    root.unlink()
    with caplog.at_level(logging.INFO):
        recorder.log(6, 6, {"a": 6.0}, epoch=0)
        assert recorder.flush(wait=10)
    assert [record.levelname for record in caplog.records[2:]] == ["INFO", "INFO"]
    recorder.close()
    assert [line["step"] for line in lines(root)] == [1, 2, 3, 4, 5, 6]
    assert len(list(root.glob("tensorboard/*"))) == 1


def test_the_oldest_go_when_the_bound_is_passed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = tmp_path / "run"
    root.write_text("")
    recorder = Recorder(RunDir(root), generation=0, start_step=0, max_records=100, tensorboard=False)
    for step in range(1, 251):
        recorder.log(step, step, {"a": float(step)}, epoch=0)
        if step % 50 == 0:
            recorder.flush(wait=10)
    root.unlink()
    recorder.close()
    assert [line["step"] for line in lines(root)] == list(range(151, 251))
    dropped = [int(record.args[0]) for record in caplog.records if "dropped" in record.msg]  # type: ignore[index,arg-type]
    assert sum(dropped) == 150


def test_a_write_that_ends_just_when_the_recorder_closes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder(RunDir(tmp_path), generation=0, start_step=0, tensorboard=False)
    gate, write, ask = threading.Event(), recorder._write, recorder._ask
    monkeypatch.setattr(recorder, "_write", lambda: gate.wait(20) and write())
    recorder.log(1, 1, {"a": 1.0}, epoch=0)
    recorder.flush()

    def ask_late() -> int:
        gate.set()
        assert recorder._thread is not None
        recorder._thread.join(0.5)  # time for the thread to end, if it could
        return ask()

    monkeypatch.setattr(recorder, "_ask", ask_late)
    recorder.log(2, 2, {"a": 2.0}, epoch=0)
    recorder.close()
    assert [line["step"] for line in lines(tmp_path)] == [1, 2]
    assert caplog.text == ""


def test_close_waits_a_bounded_time_and_says_what_is_lost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = tmp_path / "run"
    root.write_text("")
    recorder = Recorder(RunDir(root), generation=0, start_step=0)
    for step in (1, 2, 3):
        recorder.log(step, step, {"a": 1.0}, epoch=0)
    begin = time.monotonic()
    recorder.close(timeout=1.0)
    assert 0.8 < time.monotonic() - begin < 5
    assert f"3 records of metrics were not written to {root}" in caplog.text
    recorder.close()  # again: nothing happens


_DISK_FULL = """
import resource
import sys
from elastictrain.metrics.record import Recorder
from elastictrain.rundir import RunDir

recorder = Recorder(RunDir(sys.argv[1]), generation=0, start_step=0)
recorder.log(1, 1, {"a": 1.0}, epoch=0)
assert recorder.flush(wait=10)
resource.setrlimit(resource.RLIMIT_FSIZE, (400, resource.RLIM_INFINITY))
for step in range(2, 40):
    recorder.log(step, step, {"a": 1.0}, epoch=0)
assert not recorder.flush(wait=10)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
recorder.close()
"""


def test_a_full_disk_leaves_nothing_half_written(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", _DISK_FULL, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("cannot be written") == 2
    assert [line["step"] for line in lines(tmp_path)] == list(range(1, 40))

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    assert [event.step for event in accumulator.Scalars("a")] == list(range(1, 40))
    assert len(list((tmp_path / "tensorboard").iterdir())) == 1


_NEVER_CLOSED = """
import os, sys
from elastictrain.metrics.record import Recorder
from elastictrain.rundir import RunDir

recorder = Recorder(RunDir(sys.argv[1]), generation=0, start_step=0, tensorboard=False)
recorder.log(1, 1, {"a": 1.0}, epoch=0)
recorder.flush(wait=10)
recorder.log(2, 2, {"a": 1.0}, epoch=0)
if os.fork() == 0:  # a loader worker: it must neither hang nor write
    sys.exit(recorder.close() or recorder.flush(wait=5) and 1)
assert os.wait()[1] == 0
raise KeyError("the user's own error")
"""


def test_a_process_that_ends_without_closing_still_writes(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _NEVER_CLOSED, str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    assert "the user's own error" in done.stderr
    assert [line["step"] for line in lines(tmp_path)] == [1, 2]


def test_logging_costs_the_training_loop_about_a_microsecond(tmp_path: Path) -> None:
    recorder = Recorder(RunDir(tmp_path), generation=0, start_step=0)
    values = {f"train/metric_{i}": i * 1.2345678 for i in range(20)}
    took = []
    for _ in range(5):
        begin = time.perf_counter()
        for step in range(1000):
            recorder.log(step, step, values, epoch=0)
        took.append((time.perf_counter() - begin) / 1000 * 1e6)
    begin = time.process_time()
    assert recorder.flush(wait=60)
    flush = (time.process_time() - begin) / 5_000 * 1e6
    recorder.close()
    print(f"log: {statistics.median(took):.2f} µs; flush: {flush:.0f} µs per record of 20 values")
    assert min(took) < 3


def test_a_store_that_hangs_stalls_neither_training_nor_the_end(
    s3_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    s3fs = pytest.importorskip("s3fs")
    with socket.create_server(("127.0.0.1", 0)) as deaf:  # accepts connections and never answers
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{deaf.getsockname()[1]}")
        s3fs.S3FileSystem.clear_instance_cache()
        recorder = Recorder(RunDir(s3_url), generation=0, start_step=0, max_records=1000)
        begin = time.monotonic()
        for step in range(1, 5001):
            recorder.log(step, step, {"a": 1.0}, epoch=0)
            if step % 500 == 0:
                recorder.flush()
        assert not recorder.flush(wait=0.2)
        recorder.close(timeout=0.5)
        assert time.monotonic() - begin < 45.0, "who waits for an answer waits a minute: the driver's patience"
    assert "records of metrics were not written to s3://" in caplog.text


def test_s3_gets_the_same_lines(s3_url: str) -> None:
    run_dir = RunDir(s3_url)
    for generation, start in [(0, 0), (1, 2)]:
        recorder = Recorder(run_dir, generation=generation, start_step=start)
        for step in range(start + 1, start + 4):
            recorder.log(step, step, {"a": step / 2}, epoch=0)
            assert recorder.flush(wait=30)
        recorder.close()
    assert run_dir.names("metrics") == [f"g{g:06d}-{s:06d}.jsonl" for g in (0, 1) for s in range(3)]
    assert [(line["step"], line["generation"], line["a"]) for line in read_records(run_dir)] == [
        (step, int(step > 2), step / 2) for step in range(1, 6)
    ]


def test_a_snapshot_does_not_pay_for_what_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the store is down: each record becomes JSON once, and only so many are taken along."""
    encoded: list[int] = []

    def encode(record: Any, generation: int) -> str:
        encoded.append(record[0])
        return encode_line(record, generation)

    def down(*_: Any) -> None:
        raise OSError("down")

    monkeypatch.setattr(record_module, "encode_line", encode)
    monkeypatch.setattr(RunDir, "create", down)
    recorder = Recorder(RunDir(tmp_path), generation=0, start_step=0, tensorboard=False)
    sizes = []
    for step in range(1, 3001):
        recorder.log(step, step, {"a": 1.0}, epoch=0)
        recorder.log(step, step, {"b": 1.0}, epoch=0)
        if step % 500 == 0:
            found = recorder.unwritten()
            sizes.append(len(found))
            steps = [json.loads(line)["step"] for line in found]
            assert steps[-1] == step and all(steps.count(one) == 2 for one in {steps[0], steps[-1]}), "steps are whole"
    assert max(sizes) <= MOST_CARRIED and sizes[-1] > MOST_CARRIED // 2
    recorder.flush(wait=30.0)
    most = max(Counter(encoded).values())
    assert set(encoded) == set(range(1, 3001)) and most <= 4, "two records of a step, and two threads may meet in one"
    recorder.close(timeout=0.1)


def test_drawing_keeps_nobody_waiting(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What was logged is written before panels are drawn, and a flush and the end wait for no more than that."""
    may_end = threading.Event()

    def panels() -> dict[str, Panel]:
        assert may_end.wait(60.0)
        return {"run/events": Markdown("x")}

    recorder = Recorder(RunDir(tmp_path), generation=0, start_step=0, panels=panels)
    recorder.log(1, 1, {"a": 1.0}, epoch=0)
    assert recorder.flush(wait=30.0) and not may_end.is_set()
    assert [line["step"] for line in read_records(RunDir(tmp_path))] == [1]
    last = Recorder(RunDir(tmp_path), generation=1, start_step=1, panels=panels)
    last.log(2, 2, {"a": 1.0}, epoch=0)
    last.close(timeout=1.0, draws=True)
    assert "were not written" not in caplog.text
    may_end.set()
    recorder.close()


def test_what_was_logged_and_not_written_goes_on_in_another_start(tmp_path: Path) -> None:
    """As a snapshot in memory carries it: nothing is lost, whatever the values and names are."""
    run_dir = RunDir(str(tmp_path))
    first = Recorder(run_dir, generation=0, start_step=0, tensorboard=False)
    first.log(1, 10, {"loss": 0.5}, epoch=0)
    assert first.flush(wait=30.0)
    first.log(2, 20, {"loss": math.nan, "step": 7.0}, epoch=0)
    first.log(3, 30, {"loss": -math.inf, "count": 3}, epoch=1)
    lines = first.unwritten()
    assert [json.loads(line)["step"] for line in lines] == [2, 3]
    second = Recorder(run_dir, generation=1, start_step=3, tensorboard=False)
    second.take_over(lines)
    second.log(4, 40, {"loss": 0.25}, epoch=1)
    second.close()
    found = read_records(run_dir)
    assert [line["step"] for line in found] == [1, 2, 3, 4]
    assert math.isnan(found[1]["loss"]) and found[1]["value/step"] == 7.0 and found[1]["samples"] == 20
    assert found[2]["loss"] == -math.inf and found[2]["epoch"] == 1 and found[2]["generation"] == 1
    assert second.unwritten() == []
