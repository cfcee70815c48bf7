"""Checkpoints on an S3 server that misbehaves: 503s, slow and cut connections, wrong credentials, missing permissions."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import fsspec
import pytest

from elastictrain.checkpoint import CheckpointReader, DamagedError, resolve, upload
from elastictrain.checkpoint.storage import put_once
from elastictrain.errors import CheckpointError, UsageError
from elastictrain.rundir import RunDir
from tests.checkpoint.proxy import Proxy
from tests.checkpoint.states import assert_equal, blank, expected, manager


def _times(count: int, fault: str, writes: bool) -> Callable[[str, str], str | None]:
    """The first tries of each request fail, of those that change something or of those that do not."""
    tries: Counter[tuple[str, str]] = Counter()

    def failing(method: str, path: str) -> str | None:
        if (method in ("PUT", "POST", "DELETE")) != writes:
            return None
        tries[method, path] += 1
        return fault if tries[method, path] <= count else None

    return failing


def _uploads(url: str) -> Any:
    fs, path = fsspec.url_to_fs(url)
    return fs.call_s3("list_multipart_uploads", Bucket=path.split("/")[0]).get("Uploads")


def _load(url: str) -> None:
    state = blank(expected())
    CheckpointReader(url).load(state)
    assert_equal(state, expected())


@pytest.fixture
def one_try(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of botocore's, and five of s3fs's; else what lasts takes a minute."""
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["503", "cut", "slow"])
def test_what_passes_is_waited_for(fault: str, proxy: Proxy, s3_url: str) -> None:
    proxy.fault = _times(2, fault, writes=True)
    saved = manager(s3_url).save(1, expected())
    assert not _uploads(s3_url)
    proxy.fault = _times(2, fault, writes=False)
    assert resolve(s3_url) == saved.path
    _load(saved.path)


@pytest.mark.slow
@pytest.mark.usefixtures("one_try")
@pytest.mark.parametrize(
    ("since", "fault", "reason"),
    [
        ("the upload", "503", "told to say SlowDown"),
        ("a part", "503", "told to say SlowDown"),
        ("a part", "cut", "Connection"),
        ("a part", "403 AccessDenied", "PermissionError: told to say AccessDenied"),
        ("the end of the upload", "503", "told to say SlowDown"),
        ("the manifest", "403 InvalidAccessKeyId", "PermissionError: told to say InvalidAccessKeyId"),
    ],
)
def test_what_lasts_costs_one_save(since: str, fault: str, reason: str, proxy: Proxy, s3_url: str) -> None:
    remedy = "correct the credentials" if "403" in fault else "Check that the run directory can be reached and written"
    most = 2 if "403" in fault else 25
    checkpoints = manager(s3_url)
    first = checkpoints.save(1, expected())
    broken = []

    def failing(method: str, path: str) -> str | None:
        now = {
            "the upload": method in ("PUT", "POST", "DELETE"),
            "a part": "partNumber=" in path,  # and the upload can still be aborted
            "the end of the upload": method == "POST" and "uploadId=" in path,
            "the manifest": method in ("PUT", "POST", "DELETE") and (bool(broken) or "manifest" in path),
        }
        if now[since]:
            broken.append(path)
            return fault
        return None

    proxy.fault = failing
    with pytest.raises(CheckpointError) as failed:
        checkpoints.save(2, expected(seed=2))
    text = str(failed.value)
    assert reason in text and remedy in text and "older checkpoints are untouched" in text and "\n" not in text
    assert 0 < len(broken) <= most, "tries are bounded"
    assert not _uploads(s3_url), "it was aborted, or never begun"
    assert resolve(s3_url) == first.path
    _load(first.path)
    proxy.fault = lambda method, path: None
    third = checkpoints.save(3, expected())
    assert resolve(s3_url) == third.path
    assert not _uploads(s3_url)


@pytest.mark.slow
@pytest.mark.usefixtures("one_try")
@pytest.mark.parametrize(
    ("at", "fault"), [("COMMIT", "503"), ("manifest-", "403 AccessDenied"), ("shard-", "503"), ("shard-", "cut")]
)
def test_storage_that_does_not_answer_is_no_damage(at: str, fault: str, proxy: Proxy, s3_url: str) -> None:
    """An older checkpoint would be no remedy: nothing is taken in its place, and nothing changes."""
    checkpoints = manager(s3_url)
    checkpoints.save(1, expected())
    saved = checkpoints.save(2, expected())
    proxy.fault = lambda method, path: fault if method == "GET" and f"/{at}" in path else None
    state = blank(expected())
    with pytest.raises(CheckpointError, match="cannot be read .*; nothing has changed") as failed:
        CheckpointReader(saved.path).load(state)
    assert not isinstance(failed.value, DamagedError)
    assert_equal(state, blank(expected()))
    if at == "COMMIT":
        with pytest.raises(CheckpointError, match="cannot be listed"):
            checkpoints.newest()
    proxy.fault = lambda method, path: fault if method == "GET" else None
    kind = UsageError if "403" in fault else CheckpointError
    with pytest.raises(kind, match="cannot be read .*: check the address and the credentials"):
        resolve(s3_url)


def test_a_commit_is_written_once(proxy: Proxy, s3_url: str) -> None:
    """Whoever comes second is told; one whose first try went through, and whose answer was lost, is not."""
    run_dir = RunDir(s3_url)
    proxy.fault = _times(1, "lost", writes=True)
    put_once(run_dir, "checkpoints/COMMIT", b"mine")
    assert [method for method, _ in proxy.seen].count("PUT") == 2, "its answer was lost"
    with pytest.raises(FileExistsError, match="there is another COMMIT"):
        put_once(run_dir, "checkpoints/COMMIT", b"another's")
    assert run_dir.read("checkpoints", "COMMIT") == b"mine"


def test_a_store_without_conditions_gets_its_commit_all_the_same(proxy: Proxy, s3_url: str) -> None:
    run_dir = RunDir(s3_url)
    proxy.fault = _times(1, "501 NotImplemented", writes=True)
    put_once(run_dir, "checkpoints/COMMIT", b"mine")
    assert [method for method, _ in proxy.seen].count("PUT") == 2
    assert run_dir.read("checkpoints", "COMMIT") == b"mine"


def test_several_parts_of_an_upload_are_under_way_at_a_time(
    proxy: Proxy, s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first part has its answer when another one has come."""
    monkeypatch.setattr(upload, "PART_BYTES", 5 << 20)
    parts, two = set[str](), threading.Event()

    def wait(method: str, path: str) -> None:
        if "partNumber=" in path:
            parts.add(path)
            if len(parts) > 1:
                two.set()
            two.wait(60.0)

    proxy.fault = wait
    data = memoryview(bytes(11 << 20))
    blocks = upload.upload(RunDir(s3_url), "checkpoints/shard", data, before_part=lambda: None)
    assert two.is_set() and len(parts) == 3
    assert RunDir(s3_url).read("checkpoints", "shard") == data and blocks.damage(0, data) is None
