"""Runs elsewhere as they are copied for the dashboard, and values over samples."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.io_wrapper import GetLogdirSubdirectories

from elastictrain.config import MeshShape
from elastictrain.metrics.mirror import Board, clean
from elastictrain.metrics.record import Recorder
from elastictrain.metrics.views import views_of
from elastictrain.rundir import RunDir


def write(url: str, *, generation: int, start: int, stop: int, value: float) -> None:
    recorder = Recorder(RunDir(url), generation=generation, start_step=start)
    for step in range(start + 1, stop + 1):
        recorder.log(step, 8 * step, {"train/loss": value}, epoch=0)
    recorder.log_ranks(
        stop, 8 * stop, np.array([(0.5, 0.25), (0.1, 0.2)], np.float32), epoch=0, shape=MeshShape(dp_shard=2)
    )
    recorder.close()


def points(folder: Path, tag: str = "train/loss") -> list[tuple[int, float]]:
    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return [(event.step, event.value) for event in accumulator.Scalars(tag)]


def board(url: str, folder: Path, *, by_samples: bool = False) -> tuple[Board, Path]:
    view = folder / "view"
    view.mkdir()
    return Board(url, view=view, cache=folder / "cache", by_samples=by_samples), view


def test_a_run_on_s3_is_copied_and_followed(s3_url: str, tmp_path: Path) -> None:
    shown, view = board(s3_url, tmp_path)
    assert shown.update() == []
    write(s3_url, generation=0, start=0, stop=4, value=1.0)
    assert shown.update() == ["run"]
    assert points(view / "run") == [(step, 1.0) for step in range(1, 5)]
    assert points(view / "run" / "rank-00001", "rank/busy") == [(4, 0.25)]

    write(s3_url, generation=1, start=2, stop=5, value=2.0)
    (copied,) = (path for path in (view / "run").iterdir() if path.is_file())
    before = copied.stat()
    assert shown.update() == ["run"]
    assert points(view / "run") == [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0), (5, 2.0)]
    assert copied.stat() == before, "what is here already is not copied again"

    run_dir = RunDir(s3_url)
    run_dir.fs.rm_file(run_dir.join("tensorboard", copied.name))
    shown.update()
    assert not copied.exists()


def test_a_folder_of_runs_and_one_that_begins_later(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    write(str(runs / "one"), generation=0, start=0, stop=2, value=1.0)
    (runs / "empty").mkdir()
    (runs / "notes.txt").write_text("")
    shown, view = board(str(runs), tmp_path)
    assert shown.update() == ["one"]
    write(str(runs / "two"), generation=0, start=0, stop=2, value=2.0)
    assert shown.update() == ["one", "two"]
    assert points(view / "two") == [(1, 2.0), (2, 2.0)]
    found = {os.path.relpath(folder, view) for folder in GetLogdirSubdirectories(str(view))}
    assert found == {f"{run}{rank}" for run in ("one", "two") for rank in ("", "/rank-00000", "/rank-00001")}


@pytest.mark.parametrize("place", ["disk", "s3"])
def test_values_over_samples_have_no_zigzag_either(place: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    url = str(tmp_path / "run") if place == "disk" else request.getfixturevalue("s3_url")
    write(url, generation=0, start=0, stop=4, value=1.0)
    shown, view = board(url, tmp_path, by_samples=True)
    shown.update()
    assert points(view / "run") == [(8 * step, 1.0) for step in range(1, 5)]
    write(url, generation=1, start=2, stop=5, value=2.0)
    shown.update()
    assert points(view / "run") == [(8, 1.0), (16, 1.0), (24, 2.0), (32, 2.0), (40, 2.0)]


def test_views_are_of_ranks_and_of_places_on_an_axis() -> None:
    assert views_of(MeshShape()) == {}
    assert views_of(MeshShape(tp=2)) == {"rank-00000": [0], "rank-00001": [1]}
    both = views_of(MeshShape(dp_shard=2, tp=2))
    assert {name: ranks for name, ranks in both.items() if not name.startswith("rank")} == {
        "dp_shard-0": [0, 1],
        "dp_shard-1": [2, 3],
        "tp-0": [0, 2],
        "tp-1": [1, 3],
    }
    many = views_of(MeshShape(dp_shard=64, tp=2))
    assert len(many) == 66 and many["tp-1"] == list(range(1, 128, 2))


def test_objects_whose_names_lead_elsewhere_are_not_copied(s3_url: str, tmp_path: Path) -> None:
    """Nothing outside of the copy is written, and nothing removed there."""
    write(s3_url, generation=0, start=0, stop=1, value=1.0)
    run_dir = RunDir(s3_url)
    names = ("../../../evil.txt", "../evil.txt", "..\\evil.txt", ".hidden", "rank-0/../../evil.txt", "rank-0/.hidden")
    names += (
        "deep-0/deep-1/events.out.tfevents.x",
        "notes.txt",
        "rank-0/..\\evil.txt",
        "../rank-0/events.out.tfevents.x",
    )
    for name in names:
        run_dir.fs.call_s3("put_object", Bucket=bucket(run_dir), Key=f"{key(run_dir)}/tensorboard/{name}", Body=b"evil")
    assert ".." in run_dir.names("tensorboard"), "the store has them"
    shown, view = board(s3_url, tmp_path)
    others = [tmp_path / "mine.txt", tmp_path / "cache" / "mine.txt", tmp_path / "mine.jsonl"]
    (tmp_path / "cache").mkdir()
    for path in others:
        path.write_text("mine")
    for _ in range(2):
        assert shown.update() == ["run"]
    assert all(path.read_text() == "mine" for path in others)
    written = {path.name for path in tmp_path.rglob("*") if path.is_file() and path not in others}
    assert len(written) == 1 and written.pop().startswith("events.out.tfevents.g000000"), "one name, also of the ranks"
    assert points(view / "run") == [(1, 1.0)]


def bucket(run_dir: RunDir) -> str:
    return run_dir.path.split("/", 1)[0]


def key(run_dir: RunDir) -> str:
    return run_dir.path.split("/", 1)[1]


def test_a_run_whose_name_leads_elsewhere_is_not_shown(s3_url: str, tmp_path: Path) -> None:
    runs = RunDir(s3_url)
    write(f"{s3_url}/good", generation=0, start=0, stop=1, value=1.0)
    for name in ("..", ".hidden", "a\\b"):
        runs.fs.call_s3("put_object", Bucket=bucket(runs), Key=f"{key(runs)}/{name}/run.json", Body=b"{}")
    shown, _ = board(s3_url, tmp_path, by_samples=True)
    assert shown.update() == ["good"]
    assert not [path for path in tmp_path.rglob("*") if path.name in (".hidden", "a\\b")]


def test_copies_that_nobody_looks_at_are_removed(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    for name, days in (("0" * 16, 40), ("1" * 16, 1), ("notes", 40)):
        (cache / name).mkdir(parents=True)
        (cache / name / "file").write_text("")
        os.utime(cache / name, (at := time.time() - days * 86_400, at))
    clean(cache)
    assert sorted(path.name for path in cache.iterdir()) == ["1" * 16, "notes"]
    clean(tmp_path / "nothing")


def test_odd_lines_are_passed_over_where_the_axis_is_samples(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    write(url, generation=0, start=0, stop=2, value=1.0)
    about = {"step": 3, "samples": 24, "time": 1.0, "generation": 0, "epoch": 0, "train/loss": 2.0}
    changes: list[dict[str, Any]] = [
        {"samples": "x"},
        {"time": []},
        {"samples": 2**80},
        {"train/loss": "one"},
        {"epoch": None},
    ]
    changes += [{"generation": {}}, {"time": "x"}, {"samples": -1}]
    lines = [{**about, **change} for change in changes] + [{"step": 3}, about, {**about, "samples": 32, "\ud800": 1.0}]
    (tmp_path / "run" / "metrics" / "g000000-000009.jsonl").write_text("".join(json.dumps(o) + "\n" for o in lines))
    shown, view = board(url, tmp_path, by_samples=True)
    shown.update()
    assert points(view / "run") == [(8, 1.0), (16, 1.0), (24, 2.0), (32, 2.0)]
