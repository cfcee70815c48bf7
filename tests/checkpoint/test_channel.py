"""Frames between processes that share a token: whoever does not have it gets nothing, whatever was changed is noticed."""

from __future__ import annotations

import os
import select
import socket
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from elastictrain.channel import (
    MAGIC,
    MAX_BODY_BYTES,
    MAX_HEAD_BYTES,
    NONCE_BYTES,
    Channel,
    ChannelError,
    GoneError,
    RefusedError,
    key_of,
)

KEY = key_of("the run's token")
SECONDS = 20.0


def together(one: Callable[[], Any], other: Callable[[], Any]) -> tuple[Any, Any]:
    """Both at a time; what each returns or raises."""
    done: list[Any] = [None, None]

    def run(index: int, action: Callable[[], Any]) -> None:
        try:
            done[index] = action()
        except Exception as error:
            done[index] = error

    threads = [threading.Thread(target=run, args=item) for item in enumerate((one, other))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
        assert not thread.is_alive()
    return done[0], done[1]


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    pair = socket.socketpair()
    yield pair
    for one in pair:
        one.close()


def channels(sockets: tuple[socket.socket, socket.socket]) -> tuple[Channel, Channel]:
    client, server = together(lambda: Channel.connect(sockets[0], KEY), lambda: Channel.accept(sockets[1], KEY))
    assert isinstance(client, Channel) and isinstance(server, Channel), (client, server)
    return client, server


class Wire:
    """Two channels whose frames pass through here."""

    def __init__(self) -> None:
        self.pairs = [socket.socketpair() for _ in range(2)]
        (mine, client), (theirs, server) = self.pairs
        self.mine, self.theirs = mine, theirs
        threads = [threading.Thread(target=self._pass, args=item) for item in ((mine, theirs, 80), (theirs, mine, 64))]
        for thread in threads:
            thread.start()
        made = together(lambda: Channel.connect(client, KEY), lambda: Channel.accept(server, KEY))
        for thread in threads:
            thread.join(60.0)
        self.client, self.server = made

    @staticmethod
    def _pass(source: socket.socket, target: socket.socket, handshake: int) -> None:
        passed = 0
        while passed < handshake:
            data = source.recv(handshake - passed)
            passed += len(data)
            target.sendall(data)

    def frame(self, head: dict[str, Any], body: bytes) -> bytes:
        """What the client sends."""
        self.client.send(head, body)
        self.mine.setblocking(False)
        data = b""
        try:
            while True:
                data += self.mine.recv(1 << 20)
        except BlockingIOError:
            return data

    def deliver(self, data: bytes) -> Any:
        self.theirs.sendall(data)
        return self.server.receive(seconds=SECONDS)

    def close(self) -> None:
        for pair in self.pairs:
            for one in pair:
                one.close()


@pytest.fixture
def wire() -> Iterator[Wire]:
    made = Wire()
    yield made
    made.close()


def test_frames_arrive_as_they_were_sent_in_both_directions(sockets: tuple[socket.socket, socket.socket]) -> None:
    client, server = channels(sockets)
    for one, other in ((client, server), (server, client)):
        for number in range(3):
            one.send({"number": number}, b"x" * number, seconds=SECONDS)
        for number in range(3):
            message = other.receive(seconds=SECONDS)
            assert (message.head, bytes(message.body)) == ({"number": number}, b"x" * number)


def test_a_descriptor_goes_along(sockets: tuple[socket.socket, socket.socket]) -> None:
    client, server = channels(sockets)
    memory = os.memfd_create("test")
    os.write(memory, b"shared")
    client.send({"here": "it is"}, b"and more", descriptor=memory)
    message = server.receive(seconds=SECONDS)
    assert message.descriptor is not None and not os.get_inheritable(message.descriptor)
    assert os.pread(message.descriptor, 10, 0) == b"shared"
    os.close(message.descriptor)
    os.close(memory)


@pytest.mark.parametrize("at", ["client", "server"])
def test_another_token_is_refused(at: str, sockets: tuple[socket.socket, socket.socket]) -> None:
    wrong = key_of("a guess")
    client, server = together(
        lambda: Channel.connect(sockets[0], wrong if at == "client" else KEY),
        lambda: _hang_up_after(lambda: Channel.accept(sockets[1], wrong if at == "server" else KEY), sockets[1]),
    )
    assert isinstance(client, RefusedError) and isinstance(server, RefusedError)


def _hang_up_after(action: Callable[[], Any], connection: socket.socket) -> Any:
    try:
        return action()
    finally:
        connection.close()


def test_whoever_has_no_token_is_told_a_random_number_and_nothing_else(
    sockets: tuple[socket.socket, socket.socket],
) -> None:
    def stranger() -> bytes:
        sockets[0].settimeout(SECONDS)
        sockets[0].sendall(MAGIC + b"n" * NONCE_BYTES + b"p" * 32)
        data = b""
        while more := sockets[0].recv(4096):
            data += more
        return data

    heard, error = together(stranger, lambda: _hang_up_after(lambda: Channel.accept(sockets[1], KEY), sockets[1]))
    assert isinstance(error, RefusedError)
    assert len(heard) == NONCE_BYTES


def test_what_speaks_another_language_is_refused(sockets: tuple[socket.socket, socket.socket]) -> None:
    sockets[0].sendall(b"GET / HTTP/1.1\r\nHost: here\r\nAccept: */*\r\n\r\n" + b" " * 100)
    with pytest.raises(ChannelError, match="another language"):
        Channel.accept(sockets[1], KEY)


def test_whoever_says_nothing_is_not_waited_for(sockets: tuple[socket.socket, socket.socket]) -> None:
    with pytest.raises(TimeoutError):
        Channel.accept(sockets[1], KEY, seconds=0.05)
    sockets[0].close()
    with pytest.raises(GoneError):
        Channel.accept(sockets[1], KEY)


def test_a_changed_frame_is_noticed(wire: Wire) -> None:
    frame = wire.frame({"step": 1}, b"weights")
    for place in (8, len(frame) - 40, len(frame) - 1):  # the object, the bytes, the proof
        changed = Wire()
        try:
            data = bytearray(changed.frame({"step": 1}, b"weights"))
            data[place] ^= 1
            with pytest.raises(ChannelError, match="not what was sent"):
                changed.deliver(bytes(data))
        finally:
            changed.close()
    assert wire.deliver(frame).head == {"step": 1}


def test_a_repeated_frame_is_noticed(wire: Wire) -> None:
    frame = wire.frame({"step": 1}, b"")
    wire.deliver(frame)
    with pytest.raises(ChannelError, match="not what was sent"):
        wire.deliver(frame)


def test_a_frame_that_was_left_out_is_noticed(wire: Wire) -> None:
    wire.frame({"step": 1}, b"")
    second = wire.frame({"step": 2}, b"")
    with pytest.raises(ChannelError, match="not what was sent"):
        wire.deliver(second)


def test_a_frame_that_comes_back_is_no_answer(wire: Wire) -> None:
    wire.mine.setblocking(True)
    wire.mine.sendall(wire.frame({"step": 1}, b""))
    with pytest.raises(ChannelError, match="not what was sent"):
        wire.client.receive(seconds=SECONDS)


@pytest.mark.parametrize(
    "lengths", [(2**32 - 1, 0), (0, 2**32 - 1), (MAX_HEAD_BYTES + 1, 0), (2, MAX_BODY_BYTES + 1)], ids=str
)
def test_a_huge_frame_takes_no_memory(lengths: tuple[int, int], sockets: tuple[socket.socket, socket.socket]) -> None:
    _, server = channels(sockets)
    tracemalloc.start()
    sockets[0].sendall(b"".join(number.to_bytes(4, "big") for number in lengths))
    with pytest.raises(ChannelError, match="there is room for"):
        server.receive(seconds=SECONDS)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_more_than_there_is_room_for_is_refused(sockets: tuple[socket.socket, socket.socket]) -> None:
    client, server = channels(sockets)
    place = bytearray(10)
    client.send({}, b"12345")
    assert bytes(server.receive(seconds=SECONDS, into=memoryview(place)).body) == b"12345"
    client.send({}, b"12345678901")
    with pytest.raises(ChannelError, match="there is room for 10"):
        server.receive(seconds=SECONDS, into=memoryview(place))
    assert bytes(place[5:]) == bytes(5)


def test_descriptors_of_bad_frames_are_closed() -> None:
    pair = socket.socketpair()
    _, server = channels(pair)
    before = len(os.listdir("/proc/self/fd"))
    memory = os.memfd_create("test")
    socket.send_fds(pair[0], [b"\xff" * 8], [memory, memory])
    with pytest.raises(ChannelError):
        server.receive(seconds=SECONDS)
    os.close(memory)
    assert len(os.listdir("/proc/self/fd")) == before
    for one in pair:
        one.close()


class Interrupted(socket.socket):
    """Lets something happen right before each time that something is received."""

    before: Callable[[], None] = staticmethod(lambda: None)

    def recvmsg(self, *arguments: Any) -> Any:
        self.before()
        return super().recvmsg(*arguments)


def test_a_limit_for_sending_is_none_for_receiving(sockets: tuple[socket.socket, socket.socket]) -> None:
    """One thread waits for as long as it takes; another one sends on the same channel meanwhile, with a small limit."""
    interrupted = Interrupted(fileno=sockets[1].detach())
    client, server = channels((sockets[0], interrupted))

    def send() -> None:
        sender = threading.Thread(target=lambda: server.send({"is": "sent"}, seconds=0.05))
        sender.start()
        sender.join(SECONDS)

    def other_side() -> dict[str, Any]:
        head = client.receive(seconds=SECONDS).head
        quiet = select.poll()  # nobody speaks for longer than the limit, which is not the receiver's
        quiet.register(interrupted, select.POLLHUP)
        quiet.poll(200)
        client.send({"late": True}, seconds=SECONDS)
        return head

    interrupted.before = send  # type: ignore[method-assign]
    received, sent = together(lambda: server.receive().head, other_side)
    assert (received, sent) == ({"late": True}, {"is": "sent"})
    interrupted.close()


def test_sending_to_who_does_not_read_ends_in_time(sockets: tuple[socket.socket, socket.socket]) -> None:
    client, _ = channels(sockets)
    with pytest.raises(TimeoutError):
        while True:
            client.send({}, bytes(1 << 20), seconds=0.05)
