"""The run directory: any fsspec URL that all nodes reach, and the few things one may do there.

Object stores cannot append or rename, so nothing here does: everything is written as a whole new object, once; only what
agents say of themselves is replaced (:mod:`elastictrain.metrics.presence`).
:meth:`RunDir.create` refuses to overwrite. Imports no torch: the command line looks here before it starts anything.

On failure: a scheme nobody knows, missing credentials, a bucket that is not there or a directory that cannot be written
are :class:`~elastictrain.errors.UsageError`\\ s from the constructor or from :meth:`RunDir.check_writable`, which leaves
nothing behind. Buckets are never created.
"""

from __future__ import annotations

import json
import os
import posixpath
import re
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from elastictrain.errors import UsageError

# The extra that brings the driver of a scheme.
EXTRAS = {
    "s3": "s3",
    "s3a": "s3",
    "gs": "gcs",
    "gcs": "gcs",
    "az": "azure",
    "abfs": "azure",
    "abfss": "azure",
    "adl": "azure",
}


_DRIVERS = ("botocore", "aiobotocore", "aiohttp", "s3fs", "gcsfs", "google", "azure", "adlfs")


def is_storage_error(error: BaseException) -> bool:
    """Does it come from storage that cannot be reached or will not answer? Drivers have exceptions of their own."""
    return isinstance(error, OSError) or type(error).__module__.split(".")[0] in _DRIVERS


@contextmanager
def answering(make: Callable[[BaseException, str], Exception]) -> Iterator[None]:
    """Around the use of storage that may not answer.

    Args:
        make: what is raised instead of an error of the storage, from that error and its kind and first line.
    """
    try:
        yield
    except Exception as error:
        if not is_storage_error(error):
            raise
        raise make(error, first_line(error)) from error


def first_line(error: BaseException) -> str:
    """Its kind and the first line of what it says."""
    return f"{type(error).__name__}: {(str(error) or type(error).__name__).splitlines()[0]}"


def cannot_be_used(run_dir: object, reason: str) -> str:
    """What a run directory whose storage does not answer is said to be."""
    remedy = "check that it can be reached, and its permissions and credentials"
    return f"run directory {run_dir} cannot be used ({reason}): {remedy}"


def without_user(url: str) -> str:
    """A URL, or a text with some, as it may be shown: without user and password. Of Azure the container stays."""
    return re.sub(r"\b([A-Za-z][\w+.-]*)://([^/\s]*)@", _without_user, url)


def _without_user(match: re.Match[str]) -> str:
    is_container = EXTRAS.get(match[1]) == "azure" and ":" not in match[2]
    return match[0] if is_container else f"{match[1]}://"


class RunDir:
    """One run's directory.

    Args:
        url: a local path or an fsspec URL such as ``s3://bucket/run``.

    As text it is ``url`` without user and password.

    Raises:
        UsageError: the scheme is unknown or its driver is not installed (names the extra to install).
    """

    def __init__(self, url: str | os.PathLike[str]) -> None:
        self.url = os.fspath(url)
        if not self.url.strip():
            raise UsageError("the run directory is empty: give --run-dir a path or URL")
        scheme = self.url.split("://", 1)[0] if "://" in self.url else "file"
        try:
            self.fs, path = fsspec.url_to_fs(self.url)
        except ImportError as error:
            if scheme in EXTRAS:
                raise UsageError(
                    f"run directory {self}: the driver for {scheme}:// is not installed;"
                    f" pip install 'elastictrain[{EXTRAS[scheme]}]'"
                ) from error
            raise UsageError(f"run directory {self}: the driver for {scheme}:// is not installed ({error})") from error
        except ValueError as error:
            known = ", ".join(
                f"{name}:// (elastictrain[{extra}])" for name, extra in EXTRAS.items() if name in ("s3", "gs", "az")
            )
            raise UsageError(
                f"run directory {self}: unknown URL scheme {scheme}://; use a path, {known},"
                " or install the fsspec driver for it"
            ) from error
        self.path = str(path).rstrip("/") or "/"
        self.is_local = isinstance(self.fs, LocalFileSystem)
        self.is_memory = scheme == "memory"

    @property
    def protocols(self) -> tuple[str, ...]:
        """All names of the scheme."""
        names = self.fs.protocol
        return (names,) if isinstance(names, str) else tuple(names)

    def join(self, *parts: str) -> str:
        """The path of an object inside, as :attr:`fs` takes it."""
        return posixpath.join(self.path, *parts)

    def exists(self, *parts: str) -> bool:
        return bool(self.fs.exists(self.join(*parts)))

    def read(self, *parts: str) -> bytes:
        data = self.fs.cat_file(self.join(*parts))
        assert isinstance(data, bytes)
        return data

    def read_all(self, folder: str, names: Sequence[str]) -> list[bytes]:
        """Several objects of one folder; object stores are asked for many at a time."""
        if not names:
            return []
        paths = [self.join(folder, name) for name in names]
        return [bytes(data) for data in self.fs.cat_ranges(paths, None, None, on_error="raise")]

    def read_json(self, *parts: str) -> Any:
        return json.loads(self.read(*parts))

    def names(self, *parts: str) -> list[str]:
        """Names directly inside a folder; empty where it is not there."""
        folder = self.join(*parts)
        self.fs.invalidate_cache(folder)
        try:
            return sorted(posixpath.basename(str(entry).rstrip("/")) for entry in self.fs.ls(folder, detail=False))
        except FileNotFoundError:
            return []

    def create(self, data: bytes, *parts: str) -> None:
        """Write one whole new object.

        Raises:
            FileExistsError: it is already there.
        """
        path = self.join(*parts)
        if self.is_local:
            os.makedirs(posixpath.dirname(path), exist_ok=True)
            with open(path, "xb") as file:
                file.write(data)
        elif self.fs.exists(path):
            raise FileExistsError(path)
        else:
            self.fs.pipe_file(path, data)

    def check_writable(self) -> None:
        """Write a small object, delete it, and leave no folder that was not there.

        Raises:
            UsageError: it could not be written; with the system's reason and the remedy.
        """
        probe = f".probe-{uuid.uuid4().hex}"
        made = self._missing_folders() if self.is_local else []
        try:
            self.create(b"", probe)
        except Exception as error:
            raise UsageError(
                f"run directory {self} cannot be written ({first_line(error)}):"
                " choose another --run-dir, or fix its permissions or credentials"
            ) from error
        finally:
            if self.is_local:
                if os.path.exists(self.join(probe)):
                    os.remove(self.join(probe))
                for folder in made:
                    if os.path.isdir(folder):
                        os.rmdir(folder)
            else:
                try:
                    self.fs.rm_file(self.join(probe))
                except Exception:  # noqa: S110 - it was never written
                    pass

    def _missing_folders(self) -> list[str]:
        """Folders that a write would create, innermost first."""
        missing, folder = [], self.path
        while folder and not os.path.exists(folder):
            missing.append(folder)
            folder = posixpath.dirname(folder)
        return missing

    def __str__(self) -> str:
        return without_user(self.url)
