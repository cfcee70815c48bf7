"""An agent's private directory: gone when the agent ends, and when it was killed, gone when the next one starts.

Who is alive is told by a lock that the kernel gives back at a process's end; process numbers would not do, since
containers that share a temporary directory count them apart.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

PREFIX = "elastictrain-"


class PrivateDir:
    """A fresh directory that only this user can read, in shared memory where there is some.

    Attributes:
        path: where it is.
    """

    def __init__(self) -> None:
        home = _shared_memory() or tempfile.gettempdir()
        _sweep(home)
        self.path = tempfile.mkdtemp(prefix=PREFIX, dir=home)
        making = os.path.join(self.path, "making")
        self._lock = os.open(making, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        os.rename(making, os.path.join(self.path, "lock"))  # a directory without it is younger than its lock

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _shared_memory() -> str | None:
    """So that a boundary never meets a disk."""
    shared = "/dev/shm"  # noqa: S108 - a private directory is made inside
    if not os.access(shared, os.W_OK):
        return None
    space = os.statvfs(shared)
    return shared if space.f_bavail * space.f_frsize > 1 << 20 else None  # small in containers, and may be full


def _sweep(home: str) -> None:
    """Remove what killed agents of this user left."""
    for lock in Path(home).glob(f"{PREFIX}*/lock"):
        try:
            if lock.stat().st_uid != os.getuid():
                continue
            descriptor = os.open(lock, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:  # another agent was faster
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent, ignore_errors=True)
        except OSError:  # its agent lives
            pass
        finally:
            os.close(descriptor)
