"""What ``elastictrain dashboard`` shows: a local folder with one entry for each run, kept up to date.

A run on a local disk is linked. Of one elsewhere the objects are copied that are not here yet: objects are whole and never
change, so what a crash left is gone on with. Where the x axis is samples, event files are made from ``metrics/*.jsonl``.

On failure: storage that does not answer raises its own error; what was copied stays, and the next :meth:`Board.update` goes
on from there.
"""

from __future__ import annotations

import hashlib
import os
import posixpath
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from elastictrain.metrics.lines import read_objects
from elastictrain.metrics.record import FOLDER as METRICS
from elastictrain.metrics.record import Record, parse_lines
from elastictrain.metrics.tensorboard import FOLDER as EVENTS
from elastictrain.metrics.tensorboard import encode_events, encode_header
from elastictrain.rundir import RunDir


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
            yield posixpath.basename(self._root.path) or "run", self._root
            return
        for name in self._root.names():
            if name not in self._shown and is_run(child := RunDir(posixpath.join(self._root.url, name))):
                yield name, child


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
            copy_new(self._source, Path(self._local.path), self._copied)
        if self._by_samples is not None:
            self._by_samples.add(self._local)
        elif not self._view.is_symlink() and (folder := Path(self._local.join(EVENTS))).is_dir():
            self._view.symlink_to(folder.absolute(), target_is_directory=True)


def copy_new(source: RunDir, target: Path, folder: str) -> None:
    """Copy the objects of a folder, and of the folders in it, that are not at ``target`` yet; remove what is gone."""
    there = {posixpath.basename(str(entry["name"]).rstrip("/")): entry for entry in _entries(source, folder)}
    sizes = {name: entry["size"] for name, entry in there.items() if entry["type"] == "file"}
    here = target / folder
    here.mkdir(parents=True, exist_ok=True)
    for path in here.iterdir():
        if path.is_file() and path.name not in sizes:
            path.unlink()
    new = sorted(name for name, size in sizes.items() if not _is_here(here / name, size))
    for name, data in read_objects(source, folder, new):
        part = here / f".{name}.part"
        part.write_bytes(data)
        os.replace(part, here / name)
    for name in there.keys() - sizes.keys():
        copy_new(source, target, f"{folder}/{name}")


def _entries(source: RunDir, folder: str) -> list[dict[str, Any]]:
    path = source.join(folder)
    source.fs.invalidate_cache(path)
    try:
        return [entry for entry in source.fs.ls(path, detail=True) if entry["name"].rstrip("/") != path]
    except FileNotFoundError:
        return []


def _is_here(path: Path, size: int) -> bool:
    return path.exists() and path.stat().st_size == size


class BySamples:
    """Event files in ``folder`` whose steps are samples, made from ``metrics/`` and grown as that grows."""

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
            if not data.endswith(
                b"\n"
            ):  # it is being written; or was cut by a crash, and then the next start repeats it
                continue
            self._seen.add(name)
            self._append(self._events(data))

    def _events(self, data: bytes) -> bytes:
        parts: list[bytes] = []
        for line in parse_lines(data):
            fields = [line.pop(name) for name in ("step", "samples", "time", "generation", "epoch")]
            _, samples, seconds, generation, epoch = fields
            if generation != self._generation:
                self._generation = generation
                parts.append(encode_header(seconds, first=samples, charts=True))
            record: Record = (samples, samples, seconds, epoch, line)
            parts.append(encode_events([record]))
        return b"".join(parts)

    def _append(self, data: bytes) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("ab") as file:
            file.write(data)
