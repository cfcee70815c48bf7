"""What ``elastictrain dashboard`` shows: a local folder with one entry for each run, kept up to date.

A run on a local disk is linked. Of one elsewhere the objects are copied that are not here yet: objects are whole and never
change, so what a crash left is gone on with. Where the x axis is samples, event files are made from ``metrics/*.jsonl``.

On failure: storage that does not answer raises its own error; what was copied stays, and the next :meth:`Board.update` goes
on from there. Who can write to a bucket can name objects as they like: what is not named as a run names its own is not
copied, and nothing outside of the cache is written or removed.
"""

from __future__ import annotations

import hashlib
import os
import posixpath
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from elastictrain.metrics.lines import parse, read_objects
from elastictrain.metrics.record import FIELDS, LOOSE, Record
from elastictrain.metrics.record import FOLDER as METRICS
from elastictrain.metrics.series import is_sound
from elastictrain.metrics.tensorboard import FOLDER as EVENTS
from elastictrain.metrics.tensorboard import encode_events, encode_header
from elastictrain.rundir import RunDir

_OBJECT = re.compile(r"events\.out\.tfevents\.[\w.-]+|[\w-]+\.jsonl", re.ASCII)  # as a run names them
_FOLDER = re.compile(r"[A-Za-z]\w*-\d+", re.ASCII)  # rank-00003, dp_shard-1
_COPY = re.compile(r"[0-9a-f]{16}")
_KEPT = 28 * 86_400.0  # seconds that a copy stays after its last use
_PART = re.compile(r"\..+\.part")
_PART_KEPT = 86_400.0


class Board:
    """The runs in ``url``, which is one, or a folder of some.

    Args:
        view: an empty local folder; each run has a folder or a link in it.
        cache: a local folder for copies, kept from one time to the next.
        by_samples: the x axis is samples, not steps.

    Raises:
        UsageError: of :class:`~elastictrain.rundir.RunDir`.
    """

    def __init__(self, url: str, *, view: Path, cache: Path, by_samples: bool = False) -> None:
        self._root, self._view, self._cache, self._by_samples = RunDir(url), view, cache, by_samples
        self._shown: dict[str, _Shown] = {}

    def update(self) -> list[str]:
        """Bring everything up to date.

        Returns:
            names of the runs that are shown.
        """
        for name, run_dir in self._runs():
            if name not in self._shown:
                self._shown[name] = _Shown(run_dir, self._view / name, self._cache, by_samples=self._by_samples)
        for shown in self._shown.values():
            shown.update()
        return sorted(self._shown)

    def _runs(self) -> Iterator[tuple[str, RunDir]]:
        if is_run(self._root):
            name = posixpath.basename(self._root.path)
            yield (name if _is_plain(name) else "run"), self._root
            return
        for name in self._root.names():
            if (
                name not in self._shown
                and _is_plain(name)
                and is_run(child := RunDir(posixpath.join(self._root.url, name)))
            ):
                yield name, child


def clean(cache: Path) -> None:
    """Remove copies that nobody has looked at for four weeks."""
    for copy in cache.iterdir() if cache.is_dir() else ():
        if _COPY.fullmatch(copy.name) and _age(copy) > _KEPT:
            shutil.rmtree(copy, ignore_errors=True)


def _is_plain(name: str) -> bool:
    """Can it be the name of a folder within another one, and of nothing else?"""
    return bool(name) and not name.startswith(".") and not set(name) & set("/\\\0")


def _age(path: Path) -> float:
    """Seconds since it was changed; 0 where it is gone."""
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return 0.0


def is_run(run_dir: RunDir) -> bool:
    """Has a run ever logged there?"""
    return any(run_dir.exists(*parts) for parts in (("run.json",), (METRICS,), (EVENTS,)))


class _Shown:
    """One run."""

    def __init__(self, run_dir: RunDir, view: Path, cache: Path, *, by_samples: bool) -> None:
        self._source, self._view = run_dir, view
        self._copied = METRICS if by_samples else EVENTS
        self._by_samples = BySamples(view) if by_samples else None
        # Another run that was begun at the same place has another run.json.
        about = run_dir.read("run.json") if run_dir.exists("run.json") else b""
        key = hashlib.sha256(run_dir.url.encode() + b"\0" + about).hexdigest()[:16]
        self._local = RunDir(run_dir.path if run_dir.is_local else cache / key)

    def update(self) -> None:
        if not self._source.is_local:
            local = Path(self._local.path)
            folders = copy_new(self._source, local, self._copied)
            for name in folders if self._copied == EVENTS else ():
                copy_new(self._source, local, f"{EVENTS}/{name}")
            os.utime(local)  # it is in use
        if self._by_samples is not None:
            self._by_samples.add(self._local)
        elif not self._view.is_symlink() and (folder := Path(self._local.join(EVENTS))).is_dir():
            self._view.symlink_to(folder.absolute(), target_is_directory=True)


def copy_new(source: RunDir, target: Path, folder: str) -> list[str]:
    """Copy the objects of a folder that are not at ``target`` yet; remove what is gone.

    Returns:
        names of the folders in it that are like a run's own.
    """
    there = {posixpath.basename(str(entry["name"]).rstrip("/")): entry for entry in _entries(source, folder)}
    files = {name: entry for name, entry in there.items() if entry["type"] == "file"}
    sizes = {name: entry["size"] for name, entry in files.items() if _OBJECT.fullmatch(name)}
    here = target / folder
    assert here.resolve().is_relative_to(target.resolve()), (target, folder)
    here.mkdir(parents=True, exist_ok=True)
    for path in here.iterdir():
        is_gone = _OBJECT.fullmatch(path.name) and path.name not in sizes
        if is_gone or (_PART.fullmatch(path.name) and _age(path) > _PART_KEPT):
            path.unlink(missing_ok=True)
    new = sorted(name for name, size in sizes.items() if not _is_here(here / name, size))
    for name, data in read_objects(source, folder, new):
        part = here / f".{name}.{os.getpid()}.part"  # another dashboard may copy the same
        part.write_bytes(data)
        os.replace(part, here / name)
    return sorted(name for name in there.keys() - files.keys() if _FOLDER.fullmatch(name))


def _entries(source: RunDir, folder: str) -> list[dict[str, Any]]:
    path = source.join(folder)
    source.fs.invalidate_cache(path)
    try:
        return [entry for entry in source.fs.ls(path, detail=True) if entry["name"].rstrip("/") != path]
    except FileNotFoundError:
        return []


def _is_here(path: Path, size: int) -> bool:
    return path.exists() and path.stat().st_size == size


_COUNTS = ("step", "samples", "generation", "epoch")


class BySamples:
    """Event files in ``folder`` whose steps are samples, made from ``metrics/`` and grown as that grows.

    Lines that are damaged are passed over.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "events.out.tfevents.samples"
        self._seen: set[str] = set()
        self._generation = -1

    def add(self, run_dir: RunDir) -> None:
        """What is new in a local run directory."""
        for name in run_dir.names(METRICS):
            if name in self._seen or not name.endswith(".jsonl"):
                continue
            data = run_dir.read(METRICS, name)
            if not data.endswith(b"\n"):  # it is being written; or was cut, and then the next start repeats it
                continue
            self._seen.add(name)
            self._append(self._events(data))

    def _events(self, data: bytes) -> bytes:
        parts: list[bytes] = []
        for line in parse(data)[0]:
            if not (line.keys() >= set(FIELDS) and is_sound(line, counts=_COUNTS)):
                continue
            loose: dict[str, Any] = {name: LOOSE.get(value, value) for name, value in line.items()}
            _, samples, seconds, generation, epoch = (loose.pop(name) for name in FIELDS)
            if generation != self._generation:
                self._generation = generation
                parts.append(encode_header(seconds, first=samples, charts=True))
            record: Record = (samples, samples, seconds, epoch, loose)
            parts.append(encode_events([record]))
        return b"".join(parts)

    def _append(self, data: bytes) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("ab") as file:
            file.write(data)
