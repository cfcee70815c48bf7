"""A keeper among strangers, liars and the dead: what it refuses, and when it ends."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from elastictrain.channel import MAX_BODY_BYTES, Channel, ChannelError, RefusedError, key_of
from elastictrain.checkpoint.blocks import Blocks
from elastictrain.checkpoint.copies import connect
from elastictrain.checkpoint.held import About
from elastictrain.checkpoint.keeper_process import KeeperProcess, connect_local
from elastictrain.checkpoint.manifest import manifest_json
from elastictrain.checkpoint.marked import Marked, make_shared, whole_bytes
from tests.checkpoint.nodes import KEY, Node, memory_of, wait_until
from tests.helpers import begin_fork
from tests.processes import is_running

pytestmark = pytest.mark.slow  # it starts processes

SECONDS = 20.0


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    made = Node()
    yield made
    assert is_running(made.pid), "nothing that was said to it has ended it"
    made.end()


def about(**changes: Any) -> dict[str, Any]:
    base = About("a snapshot", 10, 1, "run", "job", 0, 1, 5 << 20, {})
    return {**base.to_json(), **changes}


def manifest_of(image: bytes) -> bytes:
    return manifest_json(0, 1, Blocks.of(image), {}, {})


IMAGE = bytes(range(256)) * (20 << 10)  # 5 MiB: two parts


def from_afar(node: Node, key: bytes = KEY) -> Channel:
    return connect(node.address["host"], node.address["port"], key)


# ---- strangers ------------------------------------------------------------------------------------------------------


def test_another_token_is_refused(node: Node) -> None:
    wrong = key_of("another run's token")
    with pytest.raises(RefusedError):
        from_afar(node, wrong)
    with pytest.raises(RefusedError):
        connect_local(node.address["socket"], wrong, seconds=SECONDS)
    with pytest.raises(OSError, match="keepers of this run|does not answer"):
        _Impatient().ensure(wrong, node.name, host=None)


class _Impatient(KeeperProcess):
    """Tries the one name that is taken, and cannot start another one."""

    def _start(self, server: socket.socket, key: bytes) -> None:
        server.close()


def test_a_copy_from_afar(node: Node) -> None:
    channel = from_afar(node)
    _copy(channel, IMAGE, manifest_of(IMAGE))
    assert channel.receive(seconds=SECONDS).head == {"is": "whole"}
    assert node.steps(is_copy=True) == [10]
    channel.send({"kind": "read", "what": "image", "id": "a snapshot", "rank": 0, "start": 5, "end": 1000})
    assert channel.receive(seconds=SECONDS).head == {"is": "there"}
    assert bytes(channel.receive(seconds=SECONDS).body) == IMAGE[5:1000]


def _copy(channel: Channel, image: bytes, manifest: bytes, **changes: Any) -> None:
    channel.send({"kind": "copy", "about": about(**changes), "manifest_bytes": len(manifest)})
    assert channel.receive(seconds=SECONDS).head == {"is": "go"}
    channel.send({"start": 0}, manifest)
    for start in range(0, len(image), MAX_BODY_BYTES):
        channel.send({"start": start}, image[start : start + MAX_BODY_BYTES])


# ---- liars, who have the token ----------------------------------------------------------------------------------------


def is_hung_up(channel: Channel) -> bool:
    """The keeper has closed the connection, and says nothing more."""
    with pytest.raises((ChannelError, ConnectionError)):
        channel.receive(seconds=SECONDS)
    return True


@pytest.mark.parametrize(
    "head",
    [
        {"kind": "no such word"},
        {"kind": ["list"]},
        {},
        {"kind": "copy"},
        {"kind": "copy", "about": about(num_bytes=-1), "manifest_bytes": 10},
        {"kind": "copy", "about": about(num_bytes="5"), "manifest_bytes": 10},
        {"kind": "copy", "about": about(rank=1), "manifest_bytes": 10},
        {"kind": "copy", "about": about(world_size=1 << 30), "manifest_bytes": 10},
        {"kind": "copy", "about": about(snapshot=7), "manifest_bytes": 10},
        {"kind": "copy", "about": about(), "manifest_bytes": 1 << 40},
        {"kind": "read", "what": "image", "id": "first", "rank": 0, "start": 0, "end": 1 << 40},
        {"kind": "read", "what": "image", "id": "first", "rank": 0, "start": 9, "end": 8},
        {"kind": "read", "what": "image", "id": "first", "rank": True, "start": 0, "end": 8},
        {"kind": "end"},
        {"kind": "adopt"},
        {"kind": "reject", "id": "first"},
        {"kind": "map", "id": "first", "rank": 0},
        {"kind": "drop", "id": "first", "rank": 0},
    ],
    ids=str,
)
def test_from_another_node_comes_nothing_else(head: dict[str, Any], node: Node) -> None:
    small = b"x" * 100
    copier = from_afar(node)
    _copy(copier, small, manifest_of(small), snapshot="first", num_bytes=len(small))
    assert copier.receive(seconds=SECONDS).head == {"is": "whole"}
    channel = from_afar(node)
    channel.send(head)
    assert is_hung_up(channel)
    assert "first" in [one["about"]["snapshot"] for one in node.held()]


def test_a_copy_that_no_memory_could_hold_is_refused(node: Node) -> None:
    channel = from_afar(node)
    channel.send({"kind": "copy", "about": about(num_bytes=1 << 47), "manifest_bytes": 10})
    answer = channel.receive(seconds=SECONDS).head
    assert answer["is"] == "refused" and "are free" in answer["text"]


def _not_a_manifest(channel: Channel) -> None:
    _copy(channel, b"", b"[]", snapshot="bad")


def _of_another_size(channel: Channel) -> None:
    _copy(channel, b"", manifest_of(b"small"), snapshot="bad")


def _out_of_order(channel: Channel) -> None:
    _copy(channel, b"", manifest_of(IMAGE), snapshot="bad")
    channel.send({"start": MAX_BODY_BYTES}, IMAGE[MAX_BODY_BYTES:])


def _too_much(channel: Channel) -> None:
    _copy(channel, IMAGE[:-1], manifest_of(IMAGE), snapshot="bad")
    channel.send({"start": len(IMAGE) - 1}, b"more")


def _nothing(channel: Channel) -> None:
    _copy(channel, b"", manifest_of(IMAGE), snapshot="bad")
    channel.send({"start": 0}, b"")


@pytest.mark.parametrize("lie", [_not_a_manifest, _of_another_size, _out_of_order, _too_much, _nothing])
def test_a_copy_that_is_not_what_was_announced_is_forgotten(lie: Callable[[Channel], None], node: Node) -> None:
    before = memory_of(node.pid)
    channel = from_afar(node)
    lie(channel)
    assert is_hung_up(channel)
    assert "bad" not in [one["about"]["snapshot"] for one in node.held()]
    wait_until(lambda: memory_of(node.pid) <= before)  # that of an earlier one may still have been there


def test_a_copy_that_differs_from_its_hash_is_refused(node: Node) -> None:
    channel = from_afar(node)
    image = bytearray(IMAGE)
    image[70_000] ^= 1
    _copy(channel, bytes(image), manifest_of(IMAGE), snapshot="bad")
    answer = channel.receive(seconds=SECONDS).head
    assert answer == {"is": "refused", "text": "bytes 65536 to 98304 differ from their hash"}
    assert "bad" not in [one["about"]["snapshot"] for one in node.held()]


def test_shared_memory_that_is_not_as_large_as_it_should_be_is_refused(node: Node) -> None:
    for make in (lambda: os.memfd_create("short"), lambda: make_shared("short", 100)):
        descriptor = make()
        if not os.fstat(descriptor).st_size:
            os.ftruncate(descriptor, whole_bytes(5 << 20))  # right, but it could shrink
        channel = node.connect()
        head = {"kind": "image", "image": 1, "num_bytes": 5 << 20, "tensors": {}}
        channel.send(head, descriptor=descriptor)
        assert is_hung_up(channel)
        os.close(descriptor)


@pytest.mark.parametrize(
    "head",
    [
        {"kind": "image", "image": 1, "num_bytes": -1, "tensors": {}},
        {"kind": "image", "image": 1, "num_bytes": 100},
        {"kind": "adopt", "claim": ""},
    ],
    ids=str,
)
def test_a_descriptor_that_is_of_no_use_is_closed(head: dict[str, Any], node: Node) -> None:
    descriptor = os.memfd_create("of no use")
    channel = node.connect()
    channel.send(head, descriptor=descriptor)
    assert is_hung_up(channel)
    os.close(descriptor)
    for one in os.listdir(f"/proc/{node.pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # of a connection that has just been closed
            assert "of no use" not in os.readlink(f"/proc/{node.pid}/fd/{one}")


def test_shared_memory_cannot_be_cut(tmp_path: Path) -> None:
    descriptor = make_shared("image", 100)
    memory = Marked(descriptor, 100, writable=True)
    for size in (8, 1000):
        with pytest.raises(PermissionError):
            os.truncate(f"/proc/self/fd/{descriptor}", size)
    memory.mark = 7
    assert memory.mark == 7 and bytes(memory.view) == bytes(100)


def test_a_snapshot_of_an_image_that_was_never_given_is_refused(node: Node) -> None:
    channel = node.connect()
    channel.send({"kind": "snapshot", "about": about(), "values": {}, "image": 3, "mark": 1})
    assert is_hung_up(channel)


# ---- whose it is, and how long it stays -------------------------------------------------------------------------------


def _agent(name: str, told: str, *, command: tuple[str, ...] | None = None) -> int:
    """An agent in a process of its own, which has a keeper; its pid."""
    pid = os.fork()
    if pid == 0:
        try:
            begin_fork(100.0)
            process = KeeperProcess()
            if command is not None:
                process.command = command
            process.ensure(KEY, name, host=None)
            assert process._process is not None
            Path(told + ".part").write_text(str(process._process.pid))
            os.rename(told + ".part", told)
            time.sleep(100)
        finally:
            os._exit(1)
    return pid


def test_a_keeper_outlives_a_killed_agent_and_belongs_to_the_next_one(tmp_path: Path) -> None:
    told, name = tmp_path / "pid", tmp_path.name
    agent = _agent(name, str(told))
    wait_until(told.exists)
    pid = int(told.read_text())
    other = KeeperProcess()  # of another agent on this machine: not that one's
    assert other.ensure(KEY, name, host=None)["socket"].endswith("-1")
    os.kill(agent, signal.SIGKILL)
    os.waitpid(agent, 0)
    again = KeeperProcess()
    wait_until(lambda: again._adopt(f"elastictrain-{name}-0", KEY, host="127.0.0.1", seconds=5.0))
    assert again.is_alive and is_running(pid)
    assert connect(again._address["host"], again._address["port"], KEY), "the next one listens for other nodes too"
    for one in (again, other):
        one.end()
        assert not one.is_alive
    wait_until(lambda: not is_running(pid))


def test_a_keeper_belongs_first_to_who_has_started_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another agent that finds its name taken, between the start and the first word of the one that has started it."""
    first, second = KeeperProcess(), KeeperProcess()
    start = KeeperProcess._start

    def interrupted(process: KeeperProcess, server: socket.socket, key: bytes) -> None:
        start(process, server, key)
        if process is first:
            assert second.ensure(KEY, tmp_path.name, host=None)["socket"].endswith("-1")

    monkeypatch.setattr(KeeperProcess, "_start", interrupted)
    assert first.ensure(KEY, tmp_path.name, host=None)["socket"].endswith("-0")
    first.end()
    second.end()


def test_a_keeper_that_nobody_takes_ends(tmp_path: Path) -> None:
    told = tmp_path / "pid"
    hooked = (sys.executable, "-m", "tests.checkpoint.hooked_keeper", "linger", "0.1", str(tmp_path / "flag"))
    agent = _agent(tmp_path.name, str(told), command=hooked)
    wait_until(told.exists)
    pid = int(told.read_text())
    assert is_running(pid)
    os.kill(agent, signal.SIGKILL)
    os.waitpid(agent, 0)
    wait_until(lambda: not is_running(pid))


def test_signals_that_are_meant_for_training_do_not_end_it(node: Node) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(node.pid, number)
    assert isinstance(node.held(), list)
    assert os.getsid(node.pid) == node.pid


def test_a_keeper_has_no_torch() -> None:
    code = "import sys, elastictrain.checkpoint.keeper_main; print('torch' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
