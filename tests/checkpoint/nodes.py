"""Real keepers for tests, and ranks that take snapshots into them."""

from __future__ import annotations

import os
import signal
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from elastictrain.channel import Channel, key_of
from elastictrain.checkpoint import CheckpointManager
from elastictrain.checkpoint.found import Snapshot
from elastictrain.checkpoint.held import About
from elastictrain.checkpoint.keeper_process import KeeperProcess, connect_local
from elastictrain.checkpoint.memory import Memory
from elastictrain.checkpoint.ranks import Ranks
from elastictrain.checkpoint.snapshots import Identity
from tests.checkpoint.states import manager
from tests.processes import is_running

KEY = key_of("a token of sixteen or more")
RUN = "the run"


class Node:
    """A node with a keeper; several of them are on this machine.

    Args:
        hooks: arguments of :mod:`tests.checkpoint.hooked_keeper`.
    """

    def __init__(self, name: str | None = None, *, hooks: Sequence[str] = ()) -> None:
        self.process = KeeperProcess()
        if hooks:
            self.process.command = (sys.executable, "-m", "tests.checkpoint.hooked_keeper", *hooks)
        self.name = name or uuid.uuid4().hex
        self.address = self.process.ensure(KEY, self.name, host="127.0.0.1")
        assert self.process._process is not None
        self.pid = self.process._process.pid

    def connect(self) -> Channel:
        return connect_local(self.address["socket"], KEY, seconds=20.0)

    def held(self) -> list[dict[str, Any]]:
        channel = self.connect()
        channel.send({"kind": "list"})
        held: list[dict[str, Any]] = channel.receive(seconds=20.0).head["held"]
        channel.close()
        return held

    def steps(self, *, rank: int = 0, is_copy: bool = False) -> list[int]:
        """Of the whole images of one rank, oldest first."""
        fits = [one for one in self.held() if one["is_copy"] == is_copy and one["about"]["rank"] == rank]
        return [one["about"]["step"] for one in fits]

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        assert self.process._process is not None
        self.process._process.wait()

    def kill_from_a_rank(self) -> None:
        """The same, from a process that is not its parent; its sockets are closed when this returns."""
        os.kill(self.pid, signal.SIGKILL)
        wait_until(lambda: not self._listens())

    def _listens(self) -> bool:
        try:
            self.connect().close()
        except OSError:
            return False
        return True

    def end(self) -> None:
        self.process.end()
        wait_until(lambda: not is_running(self.pid))


def wait_until(condition: Callable[[], object], *, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def meet(
    address: Mapping[str, Any] | None,
    *,
    rank: int = 0,
    world_size: int = 1,
    first: bool = True,
    fits: Callable[[list[About]], list[bool]] = lambda abouts: [True] * len(abouts),
    newer_than: int | None = None,
) -> tuple[Memory, list[Snapshot]]:
    """What a start does: meet all keepers."""
    memory = Memory(Ranks(rank, world_size), first=first, ask=lambda key: True, find=lambda seconds: address)
    return memory, memory.meet(lambda: KEY, fits, newer_than=newer_than)


def taking(
    url: str,
    address: Mapping[str, Any] | None,
    *,
    rank: int = 0,
    world_size: int = 1,
    start: int = 1,
    first: bool = True,
    base: str | None = None,
) -> CheckpointManager:
    """A manager that can take snapshots."""
    memory, _ = meet(address, rank=rank, world_size=world_size, first=first)
    checkpoints = manager(url, rank=rank, world_size=world_size)
    checkpoints.take_snapshots(memory.taker(Identity(RUN, "a job", start, base)))
    return checkpoints


def snapshot(checkpoints: CheckpointManager, step: int, state: Mapping[str, Any], **content: Any) -> None:
    checkpoints.begin(step, {**state, "trainer.step": step}, saves=False, snapshots=True, **content)


def memory_of(pid: int | str) -> int:
    """Bytes of shared images that a process has in its hands."""
    found: dict[int, int] = {}
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            path = f"/proc/{pid}/fd/{name}"
            if "memfd:elastictrain" in os.readlink(path):
                status = os.stat(path)
                found[status.st_ino] = status.st_size
        except OSError:
            pass
    return sum(found.values())
