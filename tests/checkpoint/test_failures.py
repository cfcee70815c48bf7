"""A save that fails on any rank, or whose storage says no, costs nothing but itself.

Where the other ways to fail are tested: killed at any point, test_crashes; damaged files, test_damage and test_save_load;
two jobs, test_lease; an object store that refuses, is slow or cuts connections, test_s3; files that somebody has made up,
test_untrusted; what fails in the background, test_background.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import threading
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from elastictrain.checkpoint import CheckpointManager, CheckpointReader, upload
from elastictrain.checkpoint.blocks import Hasher
from elastictrain.checkpoint.drain import POINTS
from elastictrain.checkpoint.manifest import COMMIT
from elastictrain.errors import CheckpointError
from elastictrain.rundir import RunDir
from tests.checkpoint import interrupted
from tests.checkpoint.states import assert_equal, blank, expected, load_all, manager
from tests.helpers import RankError, run_ranks


class Unpicklable(Exception):
    """An exception that cannot cross processes: sending it as it is would hang the ranks that wait for it."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.handle = lambda: text


def fail_at(point: str, error: Exception) -> Callable[[str], None]:
    def reached(passed: str) -> None:
        if passed == point:
            raise error

    return reached


def attempts(url: str) -> list[str]:
    """Folders of attempts, whatever is in them."""
    fs, path = fsspec.url_to_fs(url)
    fs.invalidate_cache()
    return sorted({name.rsplit("/", 1)[0] for name in fs.find(f"{path}/checkpoints")})


# ---- a rank that fails -----------------------------------------------------------------------------------------------


def save_failing(rank: int, world_size: int, url: str, flag: Path, at: int, point: str, error: Exception) -> str:
    dist.init_process_group("gloo")
    in_writer = point in POINTS and rank == at
    command = interrupted.command(point, str(getattr(error, "errno", 0)), flag) if in_writer else None
    checkpoints = manager(url, rank=rank, world_size=world_size, writer_command=command)
    good = checkpoints.save(1, expected())
    dist.barrier()
    flag.touch()
    if rank == at and not in_writer:
        checkpoints.saves.reached = fail_at(point, error)  # type: ignore[method-assign]
    with pytest.raises(CheckpointError) as failed:
        checkpoints.save(2, expected(seed=2))
    checkpoints.saves.reached = lambda point: None  # type: ignore[method-assign]
    assert checkpoints.newest() == good.path
    dist.barrier()
    assert attempts(url) == [good.path.removeprefix("s3://")]
    dist.barrier()
    checkpoints.save(3, expected(seed=3))  # the ranks are in step, and saving works again
    checkpoints.close()
    return str(failed.value)


@pytest.mark.parametrize(
    ("at", "point", "error", "words"),
    [
        (1, "planned", ValueError("odd layout"), ["rank 1: ValueError: odd layout.", "Check that the run directory"]),
        (
            2,
            "staged",
            Unpicklable("broken\npipe"),
            ["rank 2: Unpicklable: broken pipe.", "Check that the run directory"],
        ),
        (1, "part", OSError(5, ""), ["rank 1: OSError: [Errno 5] Input/output error.", "Check that the run directory"]),
        (0, "manifest", PermissionError(13, ""), ["rank 0: PermissionError:", "writable"]),
        (0, "gathered", OSError(28, ""), ["rank 0: OSError: [Errno 28]", "Free space there"]),
    ],
)
def test_a_failure_on_one_rank_is_one_clear_error_on_all(
    tmp_path: Path, at: int, point: str, error: Exception, words: list[str]
) -> None:
    url = str(tmp_path / "run")
    texts = run_ranks(save_failing, 3, url, tmp_path / "flag", at, point, error, timeout=120)
    assert len(set(texts)) == 1
    for word in ["no checkpoint of step 2 was written to", *words, "older checkpoints are untouched"]:
        assert word in texts[0], texts[0]
    load_all(str(next(Path(url).glob("checkpoints/step-00000003/*"))), seed=3)


@pytest.mark.slow
def test_a_failure_on_one_rank_leaves_an_object_store_clean(s3_url: str, tmp_path: Path) -> None:
    run_ranks(save_failing, 2, s3_url, tmp_path / "flag", 1, "part", OSError(5, "Input/output error"), timeout=120)
    fs, _ = fsspec.url_to_fs(s3_url)
    assert not fs.list_multipart_uploads(s3_url.removeprefix("s3://").split("/")[0])


def test_a_bad_value_on_one_rank_only_reaches_all_before_anything_is_written(tmp_path: Path) -> None:
    def save(rank: int, world_size: int) -> str:
        dist.init_process_group("gloo")
        with pytest.raises(CheckpointError) as failed:
            manager(str(tmp_path), rank=rank, world_size=2).save(1, {}, local_values={"data": {1: 2} if rank else {}})
        return str(failed.value)

    texts = run_ranks(save, 2)
    assert texts[0] == texts[1] and "rank 1: CheckpointError: the state's data is a dict" in texts[0]
    assert "Correct the state" in texts[0]
    assert list(tmp_path.iterdir()) == []


def test_local_values_with_one_name_and_two_contents_are_refused(tmp_path: Path) -> None:
    def save(rank: int, world_size: int, value: int) -> str:
        dist.init_process_group("gloo")
        manager(str(tmp_path), rank=rank, world_size=2).save(
            1, {"both": 1}, local_values={"both": 1, "mine": value * rank}
        )
        return ""

    run_ranks(save, 2, 0)
    with pytest.raises(RankError, match="two ranks give different values for mine"):
        run_ranks(save, 2, 1)


@pytest.mark.slow
def test_ranks_that_do_not_share_the_run_directory_are_told(tmp_path: Path) -> None:
    def save(rank: int, world_size: int) -> str:
        dist.init_process_group("gloo")
        with pytest.raises(CheckpointError) as failed:
            manager(str(tmp_path / f"node{rank}"), rank=rank, world_size=2).save(1, expected())
        return str(failed.value)

    texts = run_ranks(save, 2)
    assert "manifest-00001.json was written by its rank and rank 0 sees nothing of it: the run" in texts[0]
    assert "must be one that all nodes share. Check that the run directory can be reached" in texts[1]


# ---- storage that says no ------------------------------------------------------------------------------------------


def small_disk(folder: Path, megabytes: int) -> None:
    """Mount a file system of its own for this process alone; it goes with the process."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(0x00020000):  # CLONE_NEWNS
        raise PermissionError(ctypes.get_errno(), "unshare")
    assert libc.mount(b"none", b"/", None, 0x44000, None) == 0  # MS_REC | MS_PRIVATE
    options = f"size={megabytes}m".encode()
    assert libc.mount(b"tmpfs", str(folder).encode(), b"tmpfs", 0, options) == 0, os.strerror(ctypes.get_errno())


def test_a_full_disk_says_how_much_was_needed_and_keeps_the_older_checkpoint(tmp_path: Path) -> None:
    def fill(rank: int, world_size: int) -> tuple[str, list[str]] | None:
        try:
            small_disk(tmp_path, 8)
        except PermissionError:
            return None
        checkpoints = manager(str(tmp_path))
        state: dict[str, Tensor] = {"w": torch.arange(1_000_000.0)}  # 4 MB
        good = checkpoints.save(1, state)
        with pytest.raises(CheckpointError) as failed:
            checkpoints.save(2, {"w": state["w"], "more": torch.ones(1_000_000)})
        assert checkpoints.newest() == good.path
        targets = blank(state)
        CheckpointReader(good.path).load(targets)
        assert_equal(targets, state)
        return str(failed.value), attempts(str(tmp_path))

    found = run_ranks(fill, 1)[0]
    if found is None:
        pytest.skip("this user may not mount a file system")
    text, left = found
    assert "OSError: [Errno 28] No space left on device: 8000" in text, text
    assert "bytes were needed for shard-00000-of-00001.safetensors and" in text and "are missing" in text
    assert "Free space there, lower keep_last, or choose another run directory" in text
    assert len(left) == 1 and "step-00000001" in left[0]


def test_a_file_that_the_system_cuts_short_is_no_checkpoint(tmp_path: Path) -> None:
    def cut(rank: int, world_size: int) -> str:
        checkpoints = manager(str(tmp_path))
        good = checkpoints.save(1, {"w": torch.zeros(1000)})
        assert checkpoints.saves.writer_pid is not None
        resource.prlimit(checkpoints.saves.writer_pid, resource.RLIMIT_FSIZE, (1_000_000, resource.RLIM_INFINITY))
        with pytest.raises(CheckpointError) as failed:
            checkpoints.save(2, {"w": torch.zeros(1_000_000)})
        assert checkpoints.newest() == good.path
        return str(failed.value)

    text = run_ranks(cut, 1)[0]
    assert os.strerror(errno.EFBIG) in text and "bytes were needed for" in text
    assert len(attempts(str(tmp_path))) == 1


@pytest.mark.parametrize(("owner", "name"), [(os, "fdatasync"), (Hasher, "update")])
def test_an_error_beside_the_writing_is_not_lost(
    owner: object, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Write-back of the first part, in a thread of its own, and its hash; the last part is written well."""

    def fail(*args: object) -> None:
        if not failed:
            failed.append(name)
            assert owner is not os or threading.current_thread() is not threading.main_thread()
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    failed: list[str] = []
    monkeypatch.setattr(owner, name, fail)
    monkeypatch.setattr(upload, "PART_BYTES", 1 << 10)
    monkeypatch.setattr(upload, "SYNC_BYTES", 1 << 10)
    with pytest.raises(OSError, match="Input/output error"):
        upload.upload(RunDir(str(tmp_path)), "shard", memoryview(bytes(1 << 14)), before_part=lambda: None)
    assert failed == [name]


def test_a_bucket_that_is_not_there_is_not_made(s3_url: str) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint of step 1 .* Check that the run directory can be reached"):
        manager("s3://no-such-bucket-here/run").save(1, expected())
    fs, _ = fsspec.url_to_fs(s3_url)
    fs.invalidate_cache()
    assert not fs.exists("no-such-bucket-here")


def test_a_partial_attempt_that_cannot_be_removed_goes_with_the_next_commit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url, flag = str(tmp_path / "run"), tmp_path / "flag"
    checkpoints = manager(url, writer_command=interrupted.command("manifest,remove", str(errno.EBUSY), flag))
    flag.touch()
    with pytest.raises(CheckpointError, match="busy"):
        checkpoints.save(1, expected())
    assert "could not be removed" in caplog.text and len(attempts(url)) == 1
    good = checkpoints.save(2, expected())
    checkpoints.saves.finish_errands()
    assert attempts(url) == [good.path]


def test_the_attempts_of_others_are_left_alone(tmp_path: Path) -> None:
    other = tmp_path / "checkpoints" / "step-00000001" / "000000-elsewhere" / "shard-00000-of-00001.safetensors"
    other.parent.mkdir(parents=True)
    other.write_bytes(b"being written by another process")
    checkpoints = manager(str(tmp_path), keep_last=1)
    checkpoints.save(2, expected())
    checkpoints.saves.reached = fail_at("staged", OSError("lost"))  # type: ignore[method-assign]
    with pytest.raises(CheckpointError):
        checkpoints.save(1, expected())
    assert other.exists()


def test_a_commit_that_was_cut_short_is_reported_and_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints: CheckpointManager = manager(str(tmp_path))
    old = checkpoints.save(1, expected())
    cut = Path(checkpoints.save(2, expected(seed=2)).path)
    whole_commit = (cut / COMMIT).read_bytes()
    for length in (0, 1, len(whole_commit) // 2, len(whole_commit) - 1):
        (cut / COMMIT).write_bytes(whole_commit[:length])
        caplog.clear()
        assert checkpoints.newest() == old.path
        assert str(cut) in caplog.text and "is damaged" in caplog.text
