"""What the recorder wrote, as TensorBoard's own loaders and its server read it."""

from __future__ import annotations

import io
import json
import math
import os
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import crc32c as reference_crc32c
from tensorboard.context import RequestContext
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from tensorboard.summary.writer.record_writer import RecordWriter

from elastictrain.metrics import record
from elastictrain.metrics.panels import Markdown, Panel, Picture
from elastictrain.metrics.picture import encode_png
from elastictrain.metrics.record import Recorder
from elastictrain.metrics.tensorboard import crc32c, encode_events
from elastictrain.rundir import RunDir
from tests.helpers import free_port
from tests.records import read_records

STEPS = [*range(10, 70, 10), *range(70, 130, 10)]  # what must be drawn: 60 was saved, 70 to 90 were done twice


class Clock:
    """The clock of a node that is wrong by ``offset`` seconds."""

    monotonic = staticmethod(time.monotonic)

    def __init__(self, offset: float) -> None:
        self._offset = offset

    def time(self) -> float:
        return time.time() + self._offset


def write_with_a_rollback(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps 10 to 90, a crash, then from the checkpoint of step 60 to step 120, on a node whose clock is hours behind."""
    for generation, start, stop, offset in [(0, 0, 90, 0.0), (1, 60, 120, -7200.0)]:
        monkeypatch.setattr(record, "time", Clock(offset))
        recorder = Recorder(RunDir(url), generation=generation, start_step=start)
        for step in range(start + 10, stop + 1, 10):
            recorder.log(step, 8 * step, {"train/loss": 1000 * generation + step, "lr": 0.5}, epoch=0)
            if step % 30 == 0:
                recorder.log(step, 8 * step, {"val/loss": 1000 * generation + step}, epoch=0)
                recorder.flush(wait=30)
        recorder.close()


def check(points: dict[str, list[tuple[int, float]]]) -> None:
    assert [step for step, _ in points["train/loss"]] == STEPS
    assert [value for _, value in points["train/loss"]] == [step if step <= 60 else 1000 + step for step in STEPS]
    assert points["val/loss"] == [(30, 30), (60, 60), (90, 1090), (120, 1120)]
    assert points["lr"] == [(step, 0.5) for step in STEPS]


def accumulated(folder: str) -> dict[str, list[tuple[int, float]]]:
    accumulator = EventAccumulator(folder, size_guidance={"scalars": 0}).Reload()
    return {tag: [(e.step, e.value) for e in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]}


def provided(folder: str) -> dict[str, list[tuple[int, float]]]:
    """Through the data provider, as the server's own pages get it."""
    multiplexer = EventMultiplexer(tensor_size_guidance={"scalars": 0}).AddRunsFromDirectory(folder)
    provider = MultiplexerDataProvider(multiplexer.Reload(), folder)
    runs = provider.read_scalars(RequestContext(), experiment_id="", plugin_name="scalars", downsample=10_000)
    return {tag: [(point.step, point.value) for point in points] for tag, points in runs["."].items()}


@pytest.mark.parametrize("read", [accumulated, provided])
def test_a_restart_draws_no_zigzag(tmp_path: Path, read: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    write_with_a_rollback(str(tmp_path), monkeypatch)
    assert len(list((tmp_path / "tensorboard").iterdir())) == 2  # one growing file per generation
    check(read(str(tmp_path / "tensorboard")))


def test_a_restart_draws_no_zigzag_on_s3(s3_url: str, s3_server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("S3_ENDPOINT", s3_server)  # TensorBoard's own variable, for its boto3 reader
    write_with_a_rollback(s3_url, monkeypatch)
    names = RunDir(s3_url).names("tensorboard")
    assert names == [f"events.out.tfevents.g{g:06d}-{s:06d}" for g, last in [(0, 3), (1, 2)] for s in range(last)]
    check(accumulated(s3_url + "/tensorboard"))
    check(provided(s3_url + "/tensorboard"))


def test_a_run_in_progress_is_followed(tmp_path: Path) -> None:
    accumulator = None
    recorder = Recorder(RunDir(tmp_path), generation=0, start_step=0)
    for step in (1, 2, 3):
        recorder.log(step, step, {"a": float(step)}, epoch=0)
        assert recorder.flush(wait=10)
        accumulator = accumulator or EventAccumulator(str(tmp_path / "tensorboard"))
        assert [event.step for event in accumulator.Reload().Scalars("a")] == list(range(1, step + 1))
    recorder.close()


@pytest.mark.parametrize("read", [accumulated, provided])
def test_a_writer_that_should_be_gone_adds_nothing(tmp_path: Path, read: Any) -> None:
    """Rank 0 of the generation before, on a node that was cut off, goes on writing while another node has taken over."""
    old = Recorder(RunDir(tmp_path), generation=0, start_step=0)
    for step in (1, 2, 3, 4):
        old.log(step, step, {"a": float(step)}, epoch=0)
    assert old.flush(wait=10)
    new = Recorder(RunDir(tmp_path), generation=1, start_step=2)
    new.log(3, 3, {"a": 30.0}, epoch=0)
    assert new.flush(wait=10)
    old.log(5, 5, {"a": 5.0}, epoch=0)
    old.close()
    new.log(4, 4, {"a": 40.0}, epoch=0)
    new.close()
    assert read(str(tmp_path / "tensorboard")) == {"a": [(1, 1.0), (2, 2.0), (3, 30.0), (4, 40.0)]}


@pytest.mark.parametrize("read", [accumulated, provided])
def test_what_was_taken_over_and_written_after_all_is_there_once(tmp_path: Path, read: Any) -> None:
    """A snapshot in memory holds what was not written yet; its process then writes it, and dies."""
    first = Recorder(RunDir(tmp_path), generation=0, start_step=0)
    for step in (1, 2):
        first.log(step, step, {"a": float(step)}, epoch=0)
    assert first.flush(wait=10)
    first.log(2, 2, {"b": 2.0}, epoch=0)  # a validation after the same step
    first.log(3, 3, {"a": 3.0}, epoch=0)
    lines = first.unwritten()
    first.log(4, 4, {"a": 4.0}, epoch=0)
    first.close()
    second = Recorder(RunDir(tmp_path), generation=1, start_step=3)
    second.take_over(lines)
    second.log(4, 4, {"a": 40.0}, epoch=0)
    second.close()
    wanted = {"a": [(1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0)], "b": [(2, 2.0)]}
    assert read(str(tmp_path / "tensorboard")) == wanted
    found = read_records(RunDir(tmp_path))
    assert {name: [(line["step"], line[name]) for line in found if name in line] for name in "ab"} == wanted


def test_panels_are_drawn_in_the_background_and_at_the_end(tmp_path: Path) -> None:
    drawn: list[int] = []
    picture = encode_png(np.zeros((2, 4, 3), np.uint8))

    def panels() -> dict[str, Panel]:
        drawn.append(threading.get_ident())
        return {"events": Markdown(f"| drawing |\n|---|\n| {len(drawn)} |"), "nodes": Picture(picture)}

    hparams = {"lr": 0.1, "layers": {"num": 3}, "name": "net", "dims": [1, 2], "fused": True}
    hparams |= {"large": 10**400, "half\ud800": "\udc80"}
    recorder = Recorder(RunDir(tmp_path), generation=0, start_step=0, hparams=hparams, panels=panels)
    for step in (1, 2, 3):
        recorder.log(step, step, {"a": 1.0}, epoch=0)
        assert recorder.flush(wait=10)
    recorder.close(draws=True)
    assert len(drawn) == 2, "once when the run begins, and when it ends"
    assert threading.get_ident() not in drawn
    accumulator = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"tensors": 0, "images": 0}).Reload()
    texts = accumulator.Tensors("events/text_summary")
    assert [text.tensor_proto.string_val[0].decode()[-5:] for text in texts] == ["| 1 |", "| 2 |"]
    assert [text.step for text in texts] == [1, 3]
    assert [(image.width, image.height) for image in accumulator.Images("nodes")] == [(4, 2)] * 2
    (content,) = accumulator.PluginTagToContent("hparams").values()
    found = HParamsPluginData.FromString(content).session_start_info.hparams
    assert {name: value.WhichOneof("kind") for name, value in found.items()} == {
        "lr": "number_value",
        "layers.num": "number_value",
        "name": "string_value",
        "dims": "string_value",
        "fused": "bool_value",
        "large": "string_value",
        "half\\ud800": "string_value",
    }


def test_panels_that_cannot_be_drawn_are_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder(RunDir(tmp_path), generation=0, start_step=0, panels=lambda: {}["missing"])
    recorder.log(1, 1, {"a": 1.0}, epoch=0)
    assert recorder.flush(wait=10)
    recorder.log(2, 2, {"a": 2.0}, epoch=0)
    recorder.close()
    assert [line.getMessage() for line in caplog.records] == [
        "the panels of TensorBoard cannot be drawn (KeyError: 'missing'): there will be no more"
    ]
    assert accumulated(str(tmp_path / "tensorboard")) == {"a": [(1, 1.0), (2, 2.0)]}


def test_events_that_someone_deleted_do_not_stop_the_rest(tmp_path: Path) -> None:
    recorder = Recorder(RunDir(tmp_path), generation=0, start_step=0)
    recorder.log(1, 1, {"a": 1.0}, epoch=0)
    assert recorder.flush(wait=10)
    (path,) = (tmp_path / "tensorboard").iterdir()
    path.unlink()
    recorder.log(2, 2, {"a": 2.0}, epoch=0)
    recorder.close()
    assert accumulated(str(tmp_path / "tensorboard")) == {"a": [(2, 2.0)]}


def test_memory_gets_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = RunDir("memory://metrics-test/run")
    write_with_a_rollback(run_dir.url, monkeypatch)
    assert len(run_dir.names("tensorboard")) == 5
    run_dir.fs.rm(run_dir.path, recursive=True)


def test_values_outside_of_float32_are_kept_as_well_as_events_can() -> None:
    values = {"nan": math.nan, "inf": math.inf, "big": 1e300, "whole": 2**60}
    data = encode_events([(1, 1, 0.0, 0, values)])
    event = Event.FromString(data[12:-4])
    back = {value.tag: value.simple_value for value in event.summary.value}
    assert math.isnan(back["nan"]) and back["inf"] == back["big"] == math.inf and back["whole"] == 2.0**60


@pytest.mark.parametrize("size", [0, 1, 3, 4, 5, 8, 100, 1023, 1024, 1025, 1027, 2048, 5000])
def test_the_checksum_is_crc32c(size: int) -> None:
    data = os.urandom(size)
    assert crc32c(data) == reference_crc32c(data)


def test_frames_are_those_of_record_writer() -> None:
    records = [(step, step, 1e9 + step, 0, {f"metric/{i}": i / 3 for i in range(5 * step)}) for step in range(1, 12)]
    data = encode_events(records)
    buffer = io.BytesIO()
    writer = RecordWriter(buffer)
    for step, _, seconds, _, values in records:
        event = Event(wall_time=seconds, step=step)
        for tag, value in values.items():
            event.summary.value.add(tag=tag, simple_value=value)
        writer.write(event.SerializeToString())
    assert data == buffer.getvalue()


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=5) as answer:
        return json.loads(answer.read())


@pytest.mark.parametrize("fast", ["true", "false"])
def test_the_server_shows_the_run(tmp_path: Path, fast: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write_with_a_rollback(str(tmp_path), monkeypatch)
    port = free_port()
    arguments = ["--logdir", f"{tmp_path}/tensorboard", "--host", "127.0.0.1", "--port", str(port), "--load_fast", fast]
    server = subprocess.Popen(
        [sys.executable, "-m", "tensorboard.main", *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + 60
        base = f"http://127.0.0.1:{port}/data/plugin/scalars"
        while True:
            assert server.poll() is None and time.monotonic() < deadline
            try:
                if "val/loss" in get(f"{base}/tags").get(".", {}):
                    break
            except (TimeoutError, urllib.error.URLError, ConnectionError):
                pass
            time.sleep(0.2)
        points = {}
        for tag in ("train/loss", "val/loss", "lr"):
            rows = get(f"{base}/scalars?{urllib.parse.urlencode({'run': '.', 'tag': tag})}")
            points[tag] = [(step, value) for _, step, value in rows]
        check(points)
    finally:
        server.terminate()
        server.wait(10)
