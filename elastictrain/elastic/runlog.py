"""The run log: numbered objects in the run directory, each created once and by one writer only.

    log/00000042      one :class:`~elastictrain.elastic.chain.Entry` as JSON, a nonce, and a MAC by the run's token

Of any number of nodes that write the same number at the same moment, one wins. Locally that is a link to a whole new file,
on object stores a conditional put, whose answer may be lost: then the object is read back and compared with what was
written. An entry holds the whole state of the run, so the newest is enough, and old ones can go. A writer that slept while
its number was written, and removed again, finds newer ones behind it and has lost.

On failure: :class:`RunLogError` for an entry that this token has not signed, on which nothing may be built;
:class:`~elastictrain.errors.UsageError` from :meth:`RunLog.probe` for a store that cannot create exclusively; otherwise
the storage's own error, after which the entry may be there or not, or come yet.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import posixpath
import re
import secrets
import time
import urllib.parse
import uuid
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Protocol

from elastictrain.checkpoint.storage import NEW, create_first, is_exclusive
from elastictrain.elastic.chain import ChainError, Entry, Member, entry_from_json
from elastictrain.errors import ElasticTrainError, UsageError
from elastictrain.rundir import RunDir, first_line

FOLDER = "log"
KEEP = 64  # entries
REMEDY = (
    "name the node that leads by --rdzv-endpoint HOST:PORT, or use a local or shared disk, or an object store that can"
)
_NAME = re.compile(r"\d{8,}")
_STALE_SECONDS = 3600.0


class RunLogError(ElasticTrainError):
    """The log holds something that a program with this token has not written."""


class Log(Protocol):
    """What a node asks of a run log; see :class:`RunLog`."""

    def newest(self) -> Entry: ...
    def create(self, entry: Entry) -> bool: ...
    def trim(self, index: int) -> None: ...


class RunLog:
    """One run's.

    Args:
        key: of the run's token.
        folder: inside the run directory.
    """

    def __init__(self, run_dir: RunDir, key: bytes, *, folder: str = FOLDER) -> None:
        self._run_dir, self._folder = run_dir, folder
        self._key = hmac.digest(key, b"elastictrain run log", hashlib.sha256)

    def newest(self) -> Entry:
        """The newest entry; one of number 0 where there is none.

        Raises:
            RunLogError: it has no MAC by this token.
        """
        while True:
            index = self._last()
            if index == 0:
                return Entry()
            try:
                return self._open(index, self._run_dir.read(self._folder, _name(index)))
            except FileNotFoundError:  # removed meanwhile, so there are newer ones
                if self._last() <= index:
                    raise

    def history(self) -> Iterator[tuple[Entry, float]]:
        """The entries that are still there, the newest first, each with when it was written, seconds since the epoch.

        Raises:
            RunLogError: one of them has no MAC by this token.
        """
        for index in range(self._last(), 0, -1):
            try:
                yield self._opened(index, self._run_dir.read(self._folder, _name(index)))
            except FileNotFoundError:
                return

    def create(self, entry: Entry) -> bool:
        """Write an entry, unless somebody has written one of its number.

        Returns:
            whether it is this one that is there.
        """
        data = self._seal(entry)
        try:
            self._put(_name(entry.index), data)
        except FileExistsError:
            there = self._run_dir.read(self._folder, _name(entry.index))
            return (there == data or self._open(entry.index, there) == entry) and self._last() == entry.index
        return self._last() == entry.index

    def trim(self, index: int) -> None:
        """Remove what is older than the :data:`KEEP` entries before ``index``; an entry that cannot be removed stays."""
        for name in self._run_dir.names(self._folder):
            path = self._run_dir.join(self._folder, name)
            try:
                if _NAME.fullmatch(name):
                    if int(name) < index - KEEP:
                        self._run_dir.fs.rm_file(path)
                elif name.startswith(NEW) and time.time() - os.stat(path).st_mtime > _STALE_SECONDS:
                    os.unlink(path)  # on a disk, of a writer that was killed
            except Exception:  # noqa: S112 - another time
                continue

    def probe(self) -> None:
        """Can this storage say who was first? Leaves nothing behind.

        Raises:
            UsageError: it cannot, with the remedy; or it cannot be written.
        """
        where = f"run directory {self._run_dir}"
        if not is_exclusive(self._run_dir):
            scheme = self._run_dir.protocols[0]
            raise UsageError(f"{where}: {scheme}:// cannot create a file only if it is not there: {REMEDY}")
        name = f"probe-{uuid.uuid4().hex}"
        try:
            self._put(name, b"1")
            try:
                self._put(name, b"2")
                overwrites = True
            except FileExistsError:
                overwrites = False
        except Exception as error:
            text = f"{where}: this storage cannot create a file only if it is not there ({first_line(error)}): {REMEDY}"
            raise UsageError(text) from error
        finally:
            try:
                self._run_dir.fs.rm_file(self._run_dir.join(self._folder, name))
            except Exception:  # noqa: S110 - it was never written
                pass
        if overwrites:
            raise UsageError(f"{where}: this storage overwrites what it was asked to create: {REMEDY}")

    # ---- objects -----------------------------------------------------------------------------------------------------

    def _last(self) -> int:
        return max((int(name) for name in self._run_dir.names(self._folder) if _NAME.fullmatch(name)), default=0)

    def _put(self, name: str, data: bytes) -> None:
        create_first(self._run_dir, posixpath.join(self._folder, name), data)

    # ---- entries -----------------------------------------------------------------------------------------------------

    def _seal(self, entry: Entry) -> bytes:
        said = {"entry": entry.to_json(), "nonce": secrets.token_hex(16), "time": time.time()}
        return json.dumps({**said, "mac": self._mac(said)}).encode()

    def _open(self, index: int, data: bytes) -> Entry:
        return self._opened(index, data)[0]

    def _opened(self, index: int, data: bytes) -> tuple[Entry, float]:
        try:
            said = json.loads(data)
            mac = said.pop("mac")
            is_ours = hmac.compare_digest(mac, self._mac(said))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            is_ours = False
        where = self._run_dir.join(self._folder, _name(index))
        try:
            entry = entry_from_json(said["entry"]) if is_ours else Entry()
        except (KeyError, ChainError) as error:
            raise RunLogError(
                f"{where} is of another version of elastictrain ({error}): go on with that one, or give the run another"
                " --rdzv-id, which begins a new log"
            ) from error
        if not is_ours or entry.index != index:
            raise RunLogError(
                f"{where} was not written with this run's token: give all nodes the same ELASTICTRAIN_TOKEN, or remove"
                " what does not belong there"
            )
        return entry, float(said["time"])

    def _mac(self, said: Any) -> str:
        text = json.dumps(said, sort_keys=True, separators=(",", ":"))
        return hmac.digest(self._key, text.encode(), hashlib.sha256).hex()


def folder_of(run_id: str) -> str:
    """Where the log of a run lies in its directory; ``run_id``: its ``--rdzv-id``."""
    return FOLDER if run_id in ("", "none") else f"{FOLDER}-{urllib.parse.quote(run_id, safe='')}"


class FixedLog:
    """In place of a log, where one node leads because it was told to: nobody else ever writes.

    Args:
        leader: who leads.
        is_mine: this process is it.
    """

    def __init__(self, leader: Member, *, is_mine: bool) -> None:
        self._is_mine = is_mine
        base = int(time.time() * 1000) if is_mine else 1  # above all that this endpoint has given out in earlier lives
        self._entries = [Entry(1, base, leader)]
        if is_mine:
            first = self._entries[0]
            self._entries = [replace(first, generation=replace(first.generation, number=base, epoch=base))]

    def newest(self) -> Entry:
        return self._entries[-1]

    def create(self, entry: Entry) -> bool:
        if not self._is_mine or entry.index != self._entries[-1].index + 1:
            return False
        self._entries = [entry]
        return True

    def trim(self, index: int) -> None:
        pass


def _name(index: int) -> str:
    return f"{index:08d}"
