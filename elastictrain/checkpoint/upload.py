"""One whole new object from memory, in parts, with its hashes computed on the way. Imports no torch.

Locally each MiB is hashed and at once written, from the processor's cache: one pass over the memory, and one busy core less
than a thread beside it. Write-back begins while parts are still being written, and the bytes are on the disk when
:func:`upload` returns.
On S3 several parts are under way at a time; on other object stores the driver streams.

On failure: the system's or the driver's own error, retried a bounded number of times by the driver; a multipart upload is
aborted; a local file is left for the caller to remove with its folder. A disk that is too small is found before anything
is written, and the error says how many bytes are missing.
"""

from __future__ import annotations

import errno
import os
import posixpath
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import Any

from elastictrain.checkpoint.blocks import Blocks, Hasher
from elastictrain.checkpoint.storage import FULL, is_s3
from elastictrain.rundir import RunDir

PART_BYTES = 16 << 20
MAX_PARTS = 9000  # S3 allows 10,000
UNDER_WAY = 4  # parts of one upload at a time
STEP_BYTES = 1 << 20  # hashed and then written locally while they are in the processor's cache
SYNC_BYTES = 64 << 20  # how much is written locally before write-back is started


def upload(run_dir: RunDir, path: str, data: memoryview, *, before_part: Callable[[], None]) -> Blocks:
    """Write ``data`` to a new object at ``path`` inside the run directory and return its hashes.

    Args:
        before_part: called before each part, and once after the last; what it raises ends the upload.
    """
    put = _put_local if run_dir.is_local else _put_s3 if is_s3(run_dir) else _put_stream
    _check_space(run_dir, len(data), path)
    hasher = Hasher(len(data))
    try:
        put(run_dir, path, _parts(data, before_part), hasher)
    except OSError as error:
        if run_dir.is_local and error.errno in FULL:
            free = shutil.disk_usage(run_dir.path).free
            raise out_of_space(error.errno, len(data), path, free=free) from error
        raise
    before_part()
    return hasher.finish()


def part_bytes(num_bytes: int) -> int:
    return max(PART_BYTES, -(-num_bytes // MAX_PARTS))


def _parts(data: memoryview, before_part: Callable[[], None]) -> Iterator[memoryview]:
    size = part_bytes(len(data))
    for start in range(0, len(data), size):
        before_part()
        yield data[start : start + size]


# ---- local ---------------------------------------------------------------------------------------------------------


def _put_local(run_dir: RunDir, path: str, parts: Iterator[memoryview], hasher: Hasher) -> None:
    place = run_dir.join(path)
    os.makedirs(os.path.dirname(place), exist_ok=True)
    descriptor = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    syncing: Future[None] | None = None
    with ThreadPoolExecutor(1) as pool:
        try:
            unsynced = 0
            for part in parts:
                for start in range(0, len(part), STEP_BYTES):
                    step = part[start : start + STEP_BYTES]
                    hasher.update(step)
                    while step:
                        step = step[os.write(descriptor, step) :]
                unsynced += len(part)
                if unsynced >= SYNC_BYTES and (syncing is None or syncing.done()):
                    if syncing is not None:
                        syncing.result()
                    syncing, unsynced = pool.submit(os.fdatasync, descriptor), 0
            if syncing is not None:
                syncing.result()
            os.fsync(descriptor)
        finally:
            if syncing is not None:
                wait([syncing])
            os.close(descriptor)


def _check_space(run_dir: RunDir, num_bytes: int, name: str) -> None:
    """
    Raises:
        OSError: ENOSPC: a local disk has not so many bytes left.
    """
    if not run_dir.is_local:
        return
    os.makedirs(run_dir.path, exist_ok=True)
    if (free := shutil.disk_usage(run_dir.path).free) < num_bytes:
        raise out_of_space(errno.ENOSPC, num_bytes, name, free=free)


def out_of_space(number: int | None, num_bytes: int, name: str, *, free: int) -> OSError:
    """The error ``number`` with what was needed and what is missing."""
    assert number is not None
    reason = (
        f"{os.strerror(number)}: {num_bytes} bytes were needed for {posixpath.basename(name)} and {free} are free"
        f" there, {max(0, num_bytes - free)} are missing"
    )
    return OSError(number, reason)


# ---- object stores -------------------------------------------------------------------------------------------------


def _put_s3(run_dir: RunDir, path: str, parts: Iterator[memoryview], hasher: Hasher) -> None:
    fs = run_dir.fs
    bucket, key, _ = fs.split_path(run_dir.join(path))
    begun = fs.call_s3("create_multipart_upload", Bucket=bucket, Key=key)
    where = {"Bucket": bucket, "Key": key, "UploadId": begun["UploadId"]}

    def send(number: int, part: memoryview) -> dict[str, Any]:
        done = fs.call_s3("upload_part", **where, PartNumber=number, Body=bytes(part))
        return {"PartNumber": number, "ETag": done["ETag"]}

    try:
        with ThreadPoolExecutor(UNDER_WAY) as pool:
            sent: list[Future[dict[str, Any]]] = []
            try:
                for number, part in enumerate(parts, start=1):
                    hasher.update(part)
                    sent.append(pool.submit(send, number, part))
                    while len(running := [one for one in sent if not one.done()]) >= UNDER_WAY:
                        wait(running, return_when=FIRST_COMPLETED)
                    for one in sent:
                        if one.done():
                            one.result()
                done = [one.result() for one in sent]
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        fs.call_s3("complete_multipart_upload", **where, MultipartUpload={"Parts": done})
    except BaseException:
        with suppress(Exception):  # what failed is the better error; the sweep will find what is left
            fs.call_s3("abort_multipart_upload", **where)
        raise
    fs.invalidate_cache(run_dir.join(path))


def _put_stream(run_dir: RunDir, path: str, parts: Iterator[memoryview], hasher: Hasher) -> None:
    file = run_dir.fs.open(run_dir.join(path), "wb", block_size=PART_BYTES)
    try:
        for part in parts:
            hasher.update(part)
            file.write(bytes(part))
        file.close()
    except BaseException:
        with suppress(Exception):
            file.discard()
        raise
