"""Cutting the connections of process groups from another thread, so that whoever waits in a collective is let go.

Of gloo on torch 2.13 nothing else does that: not its own ``abort`` and ``shutdown``, not the end of the group (measured: a
rank whose peer is stopped waits for the group's timeout). So :class:`Connections` notes which sockets come into being while
groups, and the client of their store, are made, and :meth:`Connections.sever` shuts those down, after which every operation
on them raises ``RuntimeError`` or ``DistError`` within milliseconds; what gloo then forgets to end, the groups themselves do
not wait for (:mod:`elastictrain.parallel.groups`). NCCL has an abort of its own; where the groups have a part on GPUs it is
called as well.

On failure: on systems without ``/proc`` nothing is noted and nothing is severed; operations then end by their timeouts.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
from torch.distributed import Store

from elastictrain.compat.torch import abort_groups
from elastictrain.parallel.groups import SeverableGroup

_FDS = "/proc/self/fd"


class Connections:
    """Of the process groups of one generation."""

    def __init__(self) -> None:
        self._known: dict[int, str] = {}
        self._lock = threading.Lock()
        self._is_severed = self._is_closed = False
        self._groups: list[SeverableGroup] = []

    def group(self, store: Store, rank: int, world_size: int, timeout: timedelta) -> SeverableGroup:
        """A new one, of gloo, in which waits end when it is severed."""
        self._groups.append(SeverableGroup(store, rank, world_size, timeout, is_severed=lambda: self._is_severed))
        return self._groups[-1]

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Sockets that come into being meanwhile are the groups'."""
        before = _sockets()
        try:
            yield
        finally:
            new = {fd: inode for fd, inode in _sockets().items() if before.get(fd) != inode}
            with self._lock:
                self._known.update(new)
            if self._is_severed:  # it came while they were made
                self.sever()

    def sever(self) -> None:
        """From any thread; too late after :meth:`close`, when other groups may be there."""
        self._is_severed = True
        with self._lock:
            known, self._known = self._known, {}
            for fd, inode in known.items():
                _shut(fd, inode)
            if torch.cuda.is_available() and not self._is_closed:
                abort_groups()

    def close(self) -> None:
        """The groups are gone."""
        with self._lock:
            self._known, self._is_closed = {}, True
            groups, self._groups = self._groups, []
        for group in groups:
            group.close()


def _sockets() -> dict[int, str]:
    """By descriptor, what tells a socket apart from another one that gets its number later."""
    found: dict[int, str] = {}
    with suppress(FileNotFoundError):
        for name in os.listdir(_FDS):
            with suppress(OSError):
                target = os.readlink(f"{_FDS}/{name}")
                if target.startswith("socket:"):
                    found[int(name)] = target
    return found


def _shut(fd: int, inode: str) -> None:
    with suppress(OSError):
        if os.readlink(f"{_FDS}/{fd}") != inode:
            return
        with socket.socket(fileno=os.dup(fd)) as connection:
            # gloo ends the process if a socket on which it listens is shut down
            if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                connection.shutdown(socket.SHUT_RDWR)
