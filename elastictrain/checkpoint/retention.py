"""Which checkpoints go, and what dead writers have left. Runs in rank 0's writer process; imports no torch.

Kept are the newest few, every n-th step, the best by a metric, those that are being read, and in any case the newest one
that is whole. Whatever is newer than that one is not counted: it may turn out to be damaged.

An attempt without COMMIT, and an S3 upload that nobody finished, is swept once nothing has been added to it for
:data:`GRACE_SECONDS`: no writer lives that long after its job.

On failure: the storage's own error; what is left is left for the next time. A checkpoint that was begun to be deleted has
no COMMIT any more.
"""

from __future__ import annotations

import contextlib
import json
import math
import posixpath
import time
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from elastictrain.checkpoint import catalog, storage
from elastictrain.checkpoint.catalog import FOLDER, Entry
from elastictrain.checkpoint.contents import Contents
from elastictrain.checkpoint.manifest import DamagedError
from elastictrain.rundir import RunDir

GRACE_SECONDS = 3600.0
READING_SECONDS = 6 * 3600.0  # how long a mark of a reader that died keeps a checkpoint
READING = "reading"


@dataclass(frozen=True)
class Keep:
    """What stays. ``last`` None keeps all; ``every`` steps; the ``best`` so many by ``metric``, "min" or "max"."""

    last: int | None = 3
    every: int | None = None
    best: int | None = None
    metric: str | None = None
    mode: str = "min"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def surplus(run_dir: RunDir, keep: Keep, *, newest: Sequence[str] = (), protected: Collection[str] = ()) -> list[Entry]:
    """Committed checkpoints that may go.

    Args:
        newest: paths of this job's, oldest first. They are newer than all others, whatever their step: a run that was
            resumed from an older checkpoint than its last writes lower steps than those that lie there.
        protected: paths that stay.
    """
    if keep.last is None:
        return []
    order = {path: number for number, path in enumerate(newest, start=1)}
    found = [entry for entry in catalog.entries(run_dir) if entry.commit is not None]
    found.sort(key=lambda entry: order.get(entry.path, 0), reverse=True)  # stable: the others stay newest first
    stays = {*protected, *being_read(run_dir)}
    good = next((number for number, entry in enumerate(found) if _is_whole(entry)), None)
    if good is None:
        return []
    counted = found[good:]
    stays |= {entry.path for entry in counted[: keep.last]}
    if keep.every is not None:
        stays |= {entry.path for entry in counted if entry.step % keep.every == 0}
    if keep.best is not None:
        scored = [(score, entry) for entry in counted if (score := _score(entry, keep)) is not None]
        scored.sort(key=lambda one: one[0], reverse=keep.mode == "max")  # stable: of equals the newer one
        stays |= {entry.path for _, entry in scored[: keep.best]}
    return [entry for entry in counted if entry.path not in stays]


def _is_whole(entry: Entry) -> bool:
    try:
        Contents.read(RunDir(entry.url))
        return True
    except DamagedError:
        return False


def _score(entry: Entry, keep: Keep) -> float | None:
    assert entry.commit is not None
    metrics = entry.commit.about.get("metrics")
    score = metrics.get(keep.metric) if isinstance(metrics, dict) else None
    return float(score) if isinstance(score, (int, float)) and math.isfinite(score) else None


def abandoned(run_dir: RunDir, *, but: Collection[str] = (), grace: float = GRACE_SECONDS) -> list[Entry]:
    """Attempts without COMMIT to which nothing has been added for ``grace`` seconds; not those of paths ``but``."""
    without = [one for one in catalog.entries(run_dir) if one.commit is None and one.damage is None]
    return [one for one in without if one.path not in but and time.time() - _touched(one) > grace]


def _touched(entry: Entry) -> float:
    fs, times = entry.run_dir.fs, [0.0]
    fs.invalidate_cache(entry.path)
    for one in [fs.info(entry.path), *fs.ls(entry.path, detail=True)]:
        when = one.get("mtime", one.get("LastModified", one.get("created", 0.0)))
        times.append(when.timestamp() if isinstance(when, datetime) else float(when or 0.0))
    return max(times)


def abandoned_uploads(run_dir: RunDir, *, grace: float = GRACE_SECONDS) -> list[dict[str, str]]:
    """Multipart uploads to this run's checkpoints that were begun longer ago than that and never finished."""
    if not storage.is_s3(run_dir):
        return []
    bucket, prefix, _ = run_dir.fs.split_path(run_dir.join(FOLDER))
    found: list[dict[str, str]] = []
    place: dict[str, str] = {}
    while True:
        page = run_dir.fs.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=f"{prefix}/", **place)
        for one in page.get("Uploads", []):
            if (datetime.now(UTC) - one["Initiated"]).total_seconds() > grace:
                found.append({"Bucket": bucket, "Key": one["Key"], "UploadId": one["UploadId"]})  # noqa: PERF401
        if not page.get("IsTruncated"):
            return found
        place = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}


def tidy(
    run_dir: RunDir, keep: Keep, *, newest: Sequence[str], protected: Collection[str], under_way: Collection[str]
) -> None:
    """Delete what may go and sweep what is abandoned."""
    for entry in surplus(run_dir, keep, newest=newest, protected=[*protected, *under_way]):
        catalog.delete(entry)
    sweep(run_dir, but=under_way)


def sweep(run_dir: RunDir, *, but: Collection[str] = (), grace: float = GRACE_SECONDS) -> None:
    """Remove abandoned attempts and uploads."""
    for entry in abandoned(run_dir, but=but, grace=grace):
        catalog.delete(entry)
    for upload in abandoned_uploads(run_dir, grace=grace):
        run_dir.fs.call_s3("abort_multipart_upload", **upload)


# ---- readers -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def reading(run_dir: RunDir, path: str) -> Iterator[None]:
    """Keep others from deleting a checkpoint while it is read. Where one may only read, nothing is marked."""
    name = posixpath.join(FOLDER, READING, f"{uuid.uuid4().hex}.json")
    mark = {"folder": path.removeprefix(run_dir.path + "/"), "until": time.time() + READING_SECONDS}
    with contextlib.suppress(Exception):
        storage.put(run_dir, name, json.dumps(mark).encode())
    try:
        yield
    finally:
        with contextlib.suppress(Exception):
            run_dir.fs.rm_file(run_dir.join(name))


def being_read(run_dir: RunDir) -> list[str]:
    """Paths that somebody reads; marks of readers that died go."""
    paths = []
    for name in run_dir.names(FOLDER, READING):
        mark: Mapping[str, Any]
        try:
            mark = run_dir.read_json(FOLDER, READING, name)
            is_over = mark["until"] < time.time()
            folder = str(mark["folder"])
        except FileNotFoundError:
            continue
        except (ValueError, TypeError, KeyError):
            is_over, folder = True, ""
        if is_over:
            with contextlib.suppress(FileNotFoundError):
                run_dir.fs.rm_file(run_dir.join(FOLDER, READING, name))
        else:
            paths.append(run_dir.join(folder))
    return paths
