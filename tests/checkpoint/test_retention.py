"""What is kept, what goes, and what dead writers left."""

from __future__ import annotations

import os
from pathlib import Path

import fsspec
import pytest
import torch

from elastictrain import CheckpointConfig, UsageError
from elastictrain.checkpoint import catalog, retention
from elastictrain.checkpoint.manifest import COMMIT
from elastictrain.checkpoint.retention import Keep, reading, surplus, sweep
from elastictrain.rundir import RunDir
from tests.checkpoint.states import manager

STATE = {"w": torch.arange(100.0)}


def fill(url: str, losses: list[float], **config: object) -> list[int]:
    """Save a step for each loss; the steps that are left."""
    checkpoints = manager(url, **config)
    for step, loss in enumerate(losses, start=1):
        checkpoints.save(step, STATE, about={"metrics": {"val/loss": loss}})
    checkpoints.close()
    return steps(url)


def steps(url: str) -> list[int]:
    return [entry.step for entry in catalog.entries(RunDir(url)) if entry.commit is not None]


def test_every_so_many_steps_and_the_best_stay(tmp_path: Path) -> None:
    losses = [9.0, 1.0, 8.0, 7.0, 6.0, 5.0, 4.0]
    assert fill(str(tmp_path / "a"), losses, keep_last=1, keep_every=3) == [7, 6, 3]
    best = {"keep_best": 2, "best_metric": "val/loss"}
    assert fill(str(tmp_path / "b"), losses, keep_last=1, **best) == [7, 2]
    assert fill(str(tmp_path / "c"), losses, keep_last=1, best_mode="max", **best) == [7, 3, 1]
    assert fill(str(tmp_path / "d"), losses, keep_last=1, keep_best=1, best_metric="no/such") == [7]


def test_the_newest_whole_one_stays_and_what_is_newer_is_not_counted(tmp_path: Path) -> None:
    fill(str(tmp_path), [1.0] * 4, keep_last=None)
    for entry in list(catalog.entries(RunDir(str(tmp_path))))[:2]:
        (Path(entry.path) / "shard-00000-of-00001.safetensors").unlink()
    assert [entry.step for entry in surplus(RunDir(str(tmp_path)), Keep(last=1))] == [1]
    for entry in list(catalog.entries(RunDir(str(tmp_path))))[2:]:
        (Path(entry.path) / "manifest-00000.json").unlink()
    assert surplus(RunDir(str(tmp_path)), Keep(last=1)) == []


def test_one_that_is_read_stays_until_it_is_not(tmp_path: Path) -> None:
    """As reported in lightning#21813: the checkpoint that a run had resumed from was deleted."""
    fill(str(tmp_path), [1.0] * 3, keep_last=None)
    run_dir = RunDir(str(tmp_path))
    oldest = list(catalog.entries(run_dir))[-1]
    with reading(run_dir, oldest.path):
        assert [entry.step for entry in surplus(run_dir, Keep(last=1))] == [2]
    assert [entry.step for entry in surplus(run_dir, Keep(last=1))] == [2, 1]


def test_the_mark_of_a_reader_that_died_does_not_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(str(tmp_path), [1.0] * 2, keep_last=None)
    run_dir = RunDir(str(tmp_path))
    monkeypatch.setattr(retention, "READING_SECONDS", -1.0)
    with reading(run_dir, list(catalog.entries(run_dir))[-1].path):
        assert retention.being_read(run_dir) == []
    assert run_dir.names("checkpoints", "reading") == []


@pytest.mark.parametrize("storage", ["local", "s3"])
def test_abandoned_attempts_and_uploads_go_after_the_grace_period(
    storage: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    url = str(tmp_path) if storage == "local" else request.getfixturevalue("s3_url")
    good = manager(url).save(1, STATE).path
    run_dir = RunDir(url)
    left = run_dir.join("checkpoints", "step-00000002", "000000-dead")
    if storage == "local":
        os.makedirs(left)
    run_dir.fs.pipe_file(f"{left}/shard-00000-of-00001.safetensors", b"half of it")
    if storage == "s3":
        bucket, key, _ = run_dir.fs.split_path(f"{left}/shard-00001-of-00002.safetensors")
        run_dir.fs.call_s3("create_multipart_upload", Bucket=bucket, Key=key)
        run_dir.fs.call_s3("create_multipart_upload", Bucket=bucket, Key="elsewhere/x")
    sweep(run_dir)
    assert run_dir.fs.exists(left), "it may still be written"
    sweep(run_dir, but=[left], grace=-60.0)
    assert run_dir.fs.exists(left)
    sweep(run_dir, grace=-60.0)
    run_dir.fs.invalidate_cache()
    assert not run_dir.fs.exists(left)
    assert manager(url).newest() == good
    if storage == "s3":
        assert [one["Key"] for one in run_dir.fs.list_multipart_uploads(bucket)] == ["elsewhere/x"]


def test_a_commit_that_is_damaged_is_not_swept(tmp_path: Path) -> None:
    path = Path(manager(str(tmp_path)).save(1, STATE).path)
    (path / COMMIT).write_bytes(b"{")
    sweep(RunDir(str(tmp_path)), grace=-60.0)
    assert path.exists()
    assert fsspec.url_to_fs(str(path))[0].exists(str(path))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"keep_every": 0}, "keep_every=0 must be at least 1"),
        ({"keep_best": 2}, "keep_best=2 and best_metric=None go together"),
        ({"best_metric": "x"}, "keep_best=None and best_metric='x' go together"),
        ({"keep_best": 1, "best_metric": "x", "best_mode": "low"}, "best_mode='low' is unknown"),
        ({"when_busy": "drop"}, "when_busy='drop' is unknown"),
        ({"on_failure": "die"}, "on_failure='die' is unknown"),
    ],
)
def test_settings_that_cannot_be(options: dict[str, object], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        CheckpointConfig(**options)  # type: ignore[arg-type]
