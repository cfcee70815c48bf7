"""What the writer process does with one rank's image: shard, manifest, and on rank 0 COMMIT. Imports no torch.

    started → part… → shard → manifest, and on rank 0: → gathered → commit → committed

The shard is written and on the disk before its manifest is begun; COMMIT is begun when every rank's manifest can be read
and every shard is seen in full size. Ranks meet in the storage alone, so a checkpoint is finished although the workers
have died. Every object is new, and written once.

On failure: the error goes to the worker, if it still lives, and the attempt has no COMMIT. Nothing is retried here beyond
what the storage's driver retries.
"""

from __future__ import annotations

import json
import logging
import posixpath
import time
from collections.abc import Callable, Mapping
from typing import Any

from elastictrain.checkpoint import retention, storage
from elastictrain.checkpoint.manifest import (
    COMMIT,
    Commit,
    DamagedError,
    Manifest,
    ManifestRef,
    manifest_json,
    manifest_name,
    shard_name,
)
from elastictrain.checkpoint.upload import upload
from elastictrain.errors import CheckpointError
from elastictrain.rundir import RunDir

# What a save passes in the writer process, in order; "part" comes before each part of a shard and after the
# last, "commit" before COMMIT is written and "committed" after.
POINTS = ("started", "part", "shard", "manifest", "gathered", "commit", "committed")

VISIBLE_SECONDS = 10.0  # how long rank 0 waits to see what all other ranks say they have written
LONGEST_PAUSE = 0.5  # between two looks for the other ranks' manifests

log = logging.getLogger(__name__)


class Cancelled(Exception):
    """The worker has no use for this attempt any more: another rank has failed."""


class Drain:
    """Does jobs, one after the other.

    Args:
        send: called with what the worker is told.

    Attributes:
        reached: called with each of :data:`POINTS`; a test's way to interrupt there.
        cancelled: numbers of jobs that shall end.
        all_written: numbers of jobs whose parts are written on every rank.
    """

    reached: Callable[[str], None] = staticmethod(lambda point: None)

    def __init__(self, send: Callable[[Mapping[str, Any]], None]) -> None:
        self._send = send
        self._run_dirs: dict[str, RunDir] = {}
        self.cancelled: set[int] = set()
        self.all_written: set[int] = set()

    def do(self, job: Mapping[str, Any], image: memoryview | None) -> None:
        """Do one job and say how it went; never raises for what storage does."""
        number = job["number"]
        try:
            run_dir = self._run_dir(job["run_dir"])
            if job["kind"] == "save":
                assert image is not None
                self._save(job, run_dir, image)
            elif job["kind"] == "remove":
                self._remove(job, run_dir)
            elif job["kind"] == "tidy":
                keep = retention.Keep(**job["keep"])
                paths = {name: job[name] for name in ("newest", "protected", "under_way")}
                retention.tidy(run_dir, keep, **paths)
                self._send({"number": number, "is": "removed"})
        except Exception as error:
            text = " ".join(str(error).split()) or type(error).__name__
            number_of = getattr(error, "errno", None)
            said = {"kind": type(error).__name__, "text": text, "errno": number_of}
            self._send({"number": number, "is": "failed", **said})

    def _remove(self, job: Mapping[str, Any], run_dir: RunDir) -> None:
        """What a failed attempt has left; one that was committed in spite of it is a checkpoint and stays."""
        self.reached("remove")
        if COMMIT not in storage.file_sizes(run_dir, job["folder"]):
            storage.remove(run_dir, job["folder"], first=COMMIT)
        self._send({"number": job["number"], "is": "removed"})

    def _run_dir(self, url: str) -> RunDir:
        if url not in self._run_dirs:
            self._run_dirs[url] = RunDir(url)
        return self._run_dirs[url]

    # ---- a rank's part -----------------------------------------------------------------------------------------------

    def _save(self, job: Mapping[str, Any], run_dir: RunDir, image: memoryview) -> None:
        started = time.monotonic()
        folder, rank, world_size = job["folder"], job["rank"], job["world_size"]
        self._pass("started", job)
        shard = posixpath.join(folder, shard_name(rank, world_size))
        blocks = upload(run_dir, shard, image, before_part=lambda: self._pass("part", job))
        self._pass("shard", job)
        manifest = manifest_json(rank, world_size, blocks, job["tensors"], job["values"])
        storage.put(run_dir, posixpath.join(folder, manifest_name(rank)), manifest)
        storage.sync_folders(run_dir, folder)
        self._pass("manifest", job)
        self._send({"number": job["number"], "is": "written", "seconds": time.monotonic() - started})
        if job["commit"] is not None:
            commit = self._commit(job, run_dir)
            self._send({"number": job["number"], "is": "committed", "num_bytes": commit.num_bytes})

    def _pass(self, point: str, job: Mapping[str, Any]) -> None:
        self.reached(point)
        if job["number"] in self.cancelled:
            raise Cancelled("another rank has failed")

    # ---- all ranks together ------------------------------------------------------------------------------------------

    def _commit(self, job: Mapping[str, Any], run_dir: RunDir) -> Commit:
        folder, about = job["folder"], job["commit"]
        refs, num_bytes = self._gather(job, run_dir)
        self._pass("gathered", job)
        commit = Commit(about["step"], about["generation"], time.time(), num_bytes, refs, about["about"])
        names = [posixpath.join(folder, manifest_name(rank)) for rank in range(len(refs))]
        storage.sync_files(run_dir, *names)  # another rank's may be seen before they are on the disk
        above = posixpath.dirname(folder)
        storage.sync_folders(run_dir, folder, above, posixpath.dirname(above), "")
        self._pass("commit", job)
        storage.put_once(run_dir, posixpath.join(folder, COMMIT), commit.to_json())
        storage.sync_folders(run_dir, folder)
        self.reached("committed")
        return commit

    def _gather(self, job: Mapping[str, Any], run_dir: RunDir) -> tuple[tuple[ManifestRef, ...], int]:
        """Wait until every rank's manifest and shard are there; the manifests' hashes and the bytes of all shards."""
        folder, world_size = job["folder"], job["world_size"]
        refs: dict[int, ManifestRef] = {}
        lengths: dict[int, int] = {}
        deadline, pause = None, 0.005
        while True:
            sizes = storage.file_sizes(run_dir, folder)
            for rank in range(world_size):
                if rank not in refs and manifest_name(rank) in sizes:
                    data = storage.read_whole(
                        run_dir, posixpath.join(folder, manifest_name(rank)), size=sizes[manifest_name(rank)]
                    )
                    try:
                        lengths[rank] = Manifest.from_json(data, rank=rank, world_size=world_size).num_bytes
                        refs[rank] = ManifestRef.of(data)
                    except DamagedError:  # only a part of it is there yet
                        pass
            lacks = [
                f"{name} was written by its rank and rank 0 sees {sizes.get(name, 'nothing')} of it"
                for rank in range(world_size)
                for name, is_there in (
                    (manifest_name(rank), rank in refs),
                    (shard_name(rank, world_size), sizes.get(shard_name(rank, world_size)) == lengths.get(rank)),
                )
                if not is_there
            ]
            if not lacks:
                return tuple(refs[rank] for rank in range(world_size)), sum(lengths.values())
            if deadline is None and job["number"] in self.all_written:
                deadline = time.monotonic() + VISIBLE_SECONDS
            if deadline is not None and time.monotonic() > deadline:
                raise CheckpointError(f"{lacks[0]}: the run directory must be one that all nodes share")
            if job["number"] in self.cancelled:
                raise Cancelled("another rank has failed")
            time.sleep(pause)
            pause = min(pause * 1.5, LONGEST_PAUSE)


def whole_line(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, separators=(",", ":")).encode() + b"\n"
