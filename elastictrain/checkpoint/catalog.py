"""Which checkpoints a run directory holds, which one is the newest that can be read, and how one is deleted.

Newest is the highest step, and among the attempts of one step the last to be committed. An attempt without COMMIT is
no checkpoint and is passed over silently: it is being written, or its writer died.

On failure: a committed attempt that turns out to be damaged is passed over with a warning that names it and what is
wrong, and the next older one is taken. Storage that cannot be reached raises its own error: an older checkpoint is no
answer to that.
"""

from __future__ import annotations

import errno
import logging
import os
import posixpath
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from elastictrain.checkpoint.contents import Contents
from elastictrain.checkpoint.manifest import COMMIT, STEP, Commit, DamagedError
from elastictrain.checkpoint.storage import file_sizes, read_whole, remove
from elastictrain.errors import CheckpointError, UsageError
from elastictrain.rundir import RunDir, answering

FOLDER = "checkpoints"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Entry:
    """One attempt as the run directory shows it; ``commit`` is None without COMMIT, or where it cannot be read."""

    run_dir: RunDir
    folder: str  # inside of the run directory
    step: int
    commit: Commit | None
    damage: str | None  # what is wrong with its COMMIT

    @property
    def url(self) -> str:
        return attempt_url(self.run_dir, self.folder)

    @property
    def path(self) -> str:
        return self.run_dir.join(self.folder)


def attempt_url(run_dir: RunDir, folder: str) -> str:
    return run_dir.join(folder) if run_dir.is_local else posixpath.join(run_dir.url.rstrip("/"), folder)


def entries(run_dir: RunDir) -> Iterator[Entry]:
    """Every attempt, newest first; one step is looked into when it is reached."""
    steps = [(int(match[1]), name) for name in run_dir.names(FOLDER) if (match := STEP.fullmatch(name))]
    for step, name in sorted(steps, reverse=True):
        folder = posixpath.join(FOLDER, name)
        if _is_link(run_dir, folder):
            yield Entry(run_dir, folder, step, None, _LINK)
        else:
            yield from _of_step(run_dir, folder)


def _of_step(run_dir: RunDir, folder: str) -> list[Entry]:
    match = STEP.fullmatch(posixpath.basename(folder) if folder else posixpath.basename(run_dir.path))
    assert match is not None, folder
    found = [
        _entry(run_dir, posixpath.join(folder, name), int(match[1]))
        for name in (run_dir.names(folder) if folder else run_dir.names())
    ]
    return sorted(found, key=lambda entry: entry.commit.time if entry.commit else 0.0, reverse=True)


_LINK = "it is a symbolic link, and what it points to may be somebody else's"


def _is_link(run_dir: RunDir, folder: str) -> bool:
    return run_dir.is_local and os.path.islink(run_dir.join(folder))


def _entry(run_dir: RunDir, folder: str, step: int) -> Entry:
    if _is_link(run_dir, folder):
        return Entry(run_dir, folder, step, None, _LINK)
    try:
        commit = Commit.from_json(read_whole(run_dir, posixpath.join(folder, COMMIT)))
        if commit.step != step:
            raise DamagedError(f"{COMMIT} is of step {commit.step}")
        return Entry(run_dir, folder, step, commit, None)
    except (FileNotFoundError, NotADirectoryError):
        return Entry(run_dir, folder, step, None, None)
    except DamagedError as error:
        return Entry(run_dir, folder, step, None, str(error))
    except OSError as error:
        if error.errno not in (errno.EISDIR, errno.ELOOP, errno.EFBIG):
            raise
        what = "is too large" if error.errno == errno.EFBIG else "is no file"
        return Entry(run_dir, folder, step, None, f"{COMMIT} {what} ({error.strerror})")


def step_of(url: str) -> int:
    """The step of an attempt of a run directory."""
    match = STEP.fullmatch(posixpath.basename(posixpath.dirname(url)))
    assert match is not None, url
    return int(match[1])


def newest(run_dir: RunDir, *, but: Collection[str] = ()) -> str | None:
    """URL of the newest attempt that is committed and whole: manifests as committed, shards of full size. Or None.

    Args:
        but: paths to pass over.
    """
    return _first_whole(entry for entry in entries(run_dir) if entry.path not in but)


def _first_whole(found: Iterator[Entry]) -> str | None:
    for entry in found:
        if entry.damage is not None:
            log.warning("checkpoint %s is damaged: %s; taking an older one", entry.url, entry.damage)
        elif entry.commit is not None:
            try:
                Contents.read(RunDir(entry.url))
                return entry.url
            except DamagedError as error:
                log.warning("%s; taking an older one", error)
    return None


def resolve(url: str) -> str:
    """The attempt that ``url`` means: itself, or the newest in a step's folder or a run directory.

    Raises:
        UsageError: there is none, it may not be read, or the URL's driver is missing.
        CheckpointError: its storage does not answer; another try may be luckier.
    """

    def unreadable(error: BaseException, reason: str) -> Exception:
        kind = UsageError if isinstance(error, PermissionError) else CheckpointError
        return kind(f"{url} cannot be read ({reason}): check the address and the credentials")

    with answering(unreadable):
        return _resolve(url)


def _resolve(url: str) -> str:
    place = RunDir(url)
    if COMMIT in file_sizes(place):
        return place.url
    if STEP.fullmatch(posixpath.basename(place.path)):
        found = _first_whole(iter(_of_step(place, "")))
    elif posixpath.basename(place.path) == FOLDER:
        found = newest(RunDir(place.url.rstrip("/").removesuffix(FOLDER)))
    else:
        found = newest(place)
    if found is None:
        raise UsageError(
            f"there is no committed checkpoint at {url}: give a run directory, a {FOLDER}/step-* folder in it,"
            f" or a folder with a {COMMIT}"
        )
    return found


def delete(entry: Entry) -> None:
    """Remove an attempt: COMMIT first, so that it is no checkpoint from then on, then the rest.

    Raises:
        OSError: or the driver's error; what is left is no checkpoint once COMMIT is gone.
    """
    remove(entry.run_dir, entry.folder, first=COMMIT)
