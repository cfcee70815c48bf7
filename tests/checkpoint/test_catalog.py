"""Which checkpoint is the newest, what a URL means, and which ones are deleted."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import fsspec
import pytest
import torch

from elastictrain.checkpoint import CheckpointReader, catalog, resolve
from elastictrain.checkpoint.manifest import COMMIT, seal
from elastictrain.errors import CheckpointError, UsageError
from elastictrain.rundir import RunDir
from tests.checkpoint.states import expected, manager

STATE = {"w": torch.arange(100.0)}


@pytest.fixture(params=["local", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    found: str = str(tmp_path) if request.param == "local" else request.getfixturevalue("s3_url")
    return found


def steps(url: str) -> list[int]:
    return [entry.step for entry in catalog.entries(RunDir(url))]


def test_newest_is_the_highest_step_and_then_the_last_commit(url: str) -> None:
    assert manager(url).newest() is None
    paths = [
        manager(url, generation=generation, keep_last=None).save(step, STATE).path
        for generation, step in enumerate([5, 30, 4, 30, 9])
    ]
    assert manager(url).newest() == paths[3]
    assert steps(url) == [30, 30, 9, 5, 4]
    fs, folder = fsspec.url_to_fs(paths[3])
    fs.rm_file(f"{folder}/{COMMIT}")
    assert manager(url).newest() == paths[1]


def test_what_is_no_checkpoint_is_passed_over(tmp_path: Path) -> None:
    """As reported in transformers#35782, Automodel#3261: a restart took an incomplete checkpoint, or hung on it."""
    path = manager(str(tmp_path)).save(3, STATE).path
    checkpoints = tmp_path / "checkpoints"
    for name in ("step-00000009/000000-abc", "step-9/x", "step-000000x0/x", "lost+found"):
        (checkpoints / name).mkdir(parents=True)
    (checkpoints / "step-00000008").write_text("a file")
    (checkpoints / "step-00000007").mkdir()
    (checkpoints / "step-00000007" / "a file").write_text("x")
    assert manager(str(tmp_path)).newest() == path


def test_a_damaged_one_is_named_and_the_next_older_is_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoints = manager(str(tmp_path), keep_last=None)
    paths = [Path(checkpoints.save(step, STATE).path) for step in range(1, 6)]
    (paths[4] / "manifest-00000.json").write_text("{}")
    (paths[3] / COMMIT).write_bytes(b"\xff")
    (paths[2] / "shard-00000-of-00001.safetensors").unlink()
    commit = json.loads((paths[1] / COMMIT).read_text())
    del commit["sha256"]
    (paths[1] / COMMIT).write_bytes(seal(json.dumps({**commit, "step": 99}).encode()))
    assert checkpoints.newest() == str(paths[0])
    for path, words in zip(
        paths[:0:-1],
        [
            "manifest-00000.json has not the size",
            "COMMIT is not JSON",
            "safetensors is missing",
            "COMMIT is of step 99",
        ],
        strict=True,
    ):
        assert any(str(path) in line and words in line for line in caplog.text.splitlines()), (path, words)


def test_storage_that_cannot_be_read_is_no_reason_to_take_an_older_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """See also test_s3.py.

    As reported in lightning#21936: ``last`` on remote storage trained from scratch, silently.
    """
    checkpoints = manager(str(tmp_path))
    checkpoints.save(1, STATE)
    checkpoints.save(2, STATE)

    def failing(*place: object) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(catalog, "read_whole", failing)
    with pytest.raises(CheckpointError, match=f"checkpoints of {tmp_path} cannot be listed: .*Input/output error"):
        checkpoints.newest()


def test_resolve_takes_a_run_a_step_or_an_attempt(url: str) -> None:
    checkpoints = manager(url)
    first, second = checkpoints.save(1, STATE).path, checkpoints.save(2, STATE).path
    step, folder = first.rsplit("/", 1)[0], first.rsplit("/", 2)[0]
    for asked, answer in {
        first: first,
        step: first,
        step + "/": first,
        folder: second,
        url: second,
        url + "/": second,
    }.items():
        assert resolve(asked).rstrip("/") == answer, asked
    assert CheckpointReader(resolve(url)).step == 2


def test_resolve_says_what_it_wants(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step-00000001" / "000000-abc").mkdir(parents=True)
    for asked in ("", "nothing", "checkpoints", "checkpoints/step-00000001", "checkpoints/step-00000001/000000-abc"):
        with pytest.raises(UsageError, match="there is no committed checkpoint at .*: give a run directory"):
            resolve(str(tmp_path / asked))


# ---- retention -----------------------------------------------------------------------------------------------------


def test_the_newest_few_are_kept(url: str) -> None:
    checkpoints = manager(url, keep_last=2)
    paths = [checkpoints.save(step, STATE).path for step in range(1, 6)]
    assert steps(url) == [5, 4]
    fs, folder = fsspec.url_to_fs(url)
    assert len(fs.find(f"{folder}/checkpoints")) == 2 * 3  # nothing of the others is left
    assert manager(url).newest() == paths[-1]
    assert not Path(url, "checkpoints", "step-00000001").exists()


def test_all_are_kept_when_asked(tmp_path: Path) -> None:
    checkpoints = manager(str(tmp_path), keep_last=None)
    for step in range(1, 6):
        checkpoints.save(step, STATE)
    assert steps(str(tmp_path)) == [5, 4, 3, 2, 1]


def test_the_one_resumed_from_is_kept(tmp_path: Path) -> None:
    old = manager(str(tmp_path)).save(1, STATE).path
    checkpoints = manager(str(tmp_path), generation=1, keep_last=1)
    checkpoints.protect(old + "/")
    for step in (2, 3, 4):
        checkpoints.save(step, STATE)
    assert steps(str(tmp_path)) == [4, 1]


def test_a_run_resumed_from_an_older_one_keeps_its_own(tmp_path: Path) -> None:
    earlier = manager(str(tmp_path), keep_last=None)
    for step in (100, 200, 300):
        earlier.save(step, STATE)
    checkpoints = manager(str(tmp_path), generation=1, keep_last=2)
    checkpoints.save(110, STATE)
    assert steps(str(tmp_path)) == [300, 110]
    checkpoints.save(120, STATE)
    checkpoints.save(130, STATE)
    assert steps(str(tmp_path)) == [130, 120]


def test_commit_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = manager(str(tmp_path))
    old = Path(checkpoints.save(1, expected()).path)

    def fail(*args: object, **kwargs: object) -> None:
        raise OSError("cannot delete")

    monkeypatch.setattr(type(checkpoints.run_dir.fs), "rm", fail)
    with pytest.raises(OSError, match="cannot delete"):
        catalog.delete(next(iter(catalog.entries(RunDir(str(tmp_path))))))
    assert old.exists() and not (old / COMMIT).exists()


def test_damaged_ones_do_not_count_and_are_not_deleted(tmp_path: Path) -> None:
    checkpoints = manager(str(tmp_path), keep_last=2)
    first = checkpoints.save(1, STATE).path
    bad = Path(checkpoints.save(2, STATE).path)
    (bad / COMMIT).write_text("{")
    checkpoints.save(3, STATE)
    assert Path(first).exists() and bad.exists()


@pytest.mark.parametrize("what", ["folder", "link"])
def test_a_commit_that_is_no_file_is_passed_over(what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    good = manager(str(tmp_path)).save(1, expected())
    attempt = tmp_path / "checkpoints" / "step-00000002" / "000000-strange"
    attempt.mkdir(parents=True)
    if what == "folder":
        (attempt / COMMIT).mkdir()
    else:
        (attempt / COMMIT).symlink_to(Path(good.path) / COMMIT)
    assert resolve(str(tmp_path)) == good.path
    assert "COMMIT is no file" in caplog.text
