"""Putting, measuring and removing a checkpoint's objects: the few things done to storage, local or not.

Objects are created whole and never again touched. Locally they are on the disk, not only in the page cache, when a put
returns. On an object store a put is one request (or a multipart upload that the driver aborts when it fails), and no
bucket is ever created.

On failure: the system's or the driver's own error.
"""

from __future__ import annotations

import errno
import os
import posixpath
import uuid

from elastictrain.rundir import RunDir

MAX_SMALL_BYTES = 1 << 28  # of a manifest, a COMMIT or a lease: none comes near
# Whose drivers create on condition: an S3 If-None-Match, a generation of 0, a put that does not overwrite.
EXCLUSIVE = ("memory", "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss")
NEW = ".new-"  # begins the name of a local file that is not whole yet
# What a file system without hard links says.
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # what a write to a full disk says


def file_sizes(run_dir: RunDir, folder: str = "") -> dict[str, int]:
    """Sizes in bytes of the objects directly inside a folder; empty where it is not there."""
    path = run_dir.join(folder) if folder else run_dir.path
    run_dir.fs.invalidate_cache(path)
    try:
        found = run_dir.fs.ls(path, detail=True)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    files = (one for one in found if one["type"] == "file" and not one.get("islink"))  # a link is none of ours
    return {posixpath.basename(one["name"]): one["size"] for one in files}


def open_local(path: str) -> int:
    """A descriptor to read a local file; a symbolic link is none of ours and is not followed.

    Raises:
        OSError: ELOOP for a link.
    """
    return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)


def read_whole(run_dir: RunDir, path: str, *, size: int | None = None) -> bytes:
    """A small object inside the run directory.

    Args:
        size: in bytes, where it is known.

    Raises:
        OSError: EFBIG where it is not small: it is not read into memory.
    """
    if run_dir.is_local:
        with open(open_local(run_dir.join(path)), "rb") as file:
            _check_small(path, os.fstat(file.fileno()).st_size)
            return file.read()
    if size is None:
        # it may have come since its folder was listed, be it by another thread
        size = run_dir.fs.info(run_dir.join(path), refresh=True)["size"]
    _check_small(path, size)
    return run_dir.read(path)


def _check_small(path: str, size: int | None) -> None:
    if size is not None and size > MAX_SMALL_BYTES:
        raise OSError(errno.EFBIG, f"{posixpath.basename(path)} has {size} bytes")


def put(run_dir: RunDir, path: str, data: bytes) -> None:
    """One whole new small object at ``path`` inside the run directory; locally on the disk when this returns."""
    if not run_dir.is_local:
        run_dir.fs.pipe_file(run_dir.join(path), data)
        return
    place = run_dir.join(path)
    os.makedirs(os.path.dirname(place), exist_ok=True)
    with open(place, "xb", buffering=0) as file:
        view = memoryview(data)
        while view:
            view = view[file.write(view) :]
        os.fsync(file.fileno())


def put_once(run_dir: RunDir, path: str, data: bytes) -> None:
    """The same, and where the store can do it, only if nobody has put anything there (S3: a conditional put).

    Raises:
        FileExistsError: something else is there.
    """
    if run_dir.is_local or not is_s3(run_dir):
        put(run_dir, path, data)
        return
    try:
        run_dir.fs.pipe_file(run_dir.join(path), data, mode="create")
    except Exception as error:
        if _is_unconditional(error):
            put(run_dir, path, data)
        elif read_whole(run_dir, path) != data:  # the first try went through and its answer was lost
            raise FileExistsError(errno.EEXIST, f"there is another {posixpath.basename(path)}", path) from error


def create_first(run_dir: RunDir, path: str, data: bytes, *, mode: int = 0o666, must_be_first: bool = True) -> None:
    """Create one whole small object; of all who do it at the same moment, one succeeds, and nobody ever reads a part of it.

    Locally that is a hard link to a whole file, on object stores a conditional put, whose answer may be lost: then the
    object is there and is what was written.

    Args:
        mode: of a local file, less the umask.
        must_be_first: False where one process writes and storage that cannot say who was first is good enough.

    Raises:
        FileExistsError: it is there.
        OSError: the storage cannot do it, or its own reasons.
    """
    if run_dir.is_local:
        _link(run_dir.join(path), data, mode=mode, must_be_first=must_be_first)
        return
    try:
        if not must_be_first and not is_exclusive(run_dir):
            put(run_dir, path, data)
        else:
            run_dir.fs.pipe_file(run_dir.join(path), data, mode="create")
    except FileExistsError:
        raise
    except OSError as error:
        if "PreconditionFailed" in str(error) or error.errno == errno.EEXIST:
            raise FileExistsError(errno.EEXIST, "it is there", path) from error
        if must_be_first or not _is_unconditional(error):
            raise
        put(run_dir, path, data)


def _is_unconditional(error: BaseException) -> bool:
    """Is it what a store says that cannot put on condition?"""
    return "NotImplemented" in str(error) or "501" in str(error)


def is_exclusive(run_dir: RunDir) -> bool:
    """May :func:`create_first` work there? A single store can be without conditions all the same."""
    return run_dir.is_local or not set(EXCLUSIVE).isdisjoint(run_dir.protocols)


def _link(path: str, data: bytes, *, mode: int, must_be_first: bool) -> None:
    """``open("x")`` would show others an empty file for a while; a link shows a whole one, over NFS too."""
    folder = os.path.dirname(path)
    os.makedirs(folder, exist_ok=True)
    new = os.path.join(folder, f"{NEW}{uuid.uuid4().hex}")
    try:
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(new, path)
        except FileExistsError:
            if os.stat(new).st_nlink != 2:  # NFS: the answer to a link that was made may be lost
                raise
        except OSError as error:
            if must_be_first or error.errno not in _NO_LINKS:
                raise
            os.replace(new, path)
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    finally:
        if os.path.exists(new):
            os.unlink(new)


def is_s3(run_dir: RunDir) -> bool:
    return "s3" in run_dir.protocols


def sync_files(run_dir: RunDir, *paths: str) -> None:
    """Make what others wrote to local files durable; nothing to do on an object store."""
    if run_dir.is_local:
        for path in paths:
            descriptor = open_local(run_dir.join(path))
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def sync_folders(run_dir: RunDir, *folders: str) -> None:
    """Make the names inside local folders durable; nothing to do on an object store."""
    if run_dir.is_local:
        for folder in folders:
            descriptor = os.open(run_dir.join(folder), os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def remove(run_dir: RunDir, folder: str, *, first: str) -> None:
    """Delete a folder and what is in it, the object ``first`` before the rest; and its parent, once that is empty.

    Raises:
        OSError: or the driver's error; what could be deleted by then is deleted.
    """
    if first in file_sizes(run_dir, folder):
        run_dir.fs.rm_file(run_dir.join(folder, first))
        sync_folders(run_dir, folder)
    if run_dir.fs.exists(run_dir.join(folder)):
        run_dir.fs.rm(run_dir.join(folder), recursive=True)
    if run_dir.is_local:
        try:
            os.rmdir(run_dir.join(posixpath.dirname(folder)))
        except OSError:
            pass  # another attempt is in it
