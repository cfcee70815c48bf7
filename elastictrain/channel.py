"""Messages between processes that share a secret, over TCP or a Unix socket: nobody else can read from, or speak to, one.

Both sides prove that they have the key before anything else is said, the one that connects first, so that whoever only
reaches the port learns nothing:

    →  MAGIC, nonce                    ←  nonce
    →  HMAC(key, "client", nonces)     ←  HMAC(key, "server", nonces)

Every message that follows is a frame: lengths, a JSON object, bytes, and the HMAC-SHA256 of all that and of the frame's
number, by a key of this connection and direction. So frames cannot be forged, changed, repeated, left out or reordered.
They are not encrypted. Lengths are compared with limits before memory is taken for them. Imports no torch.

On failure: :class:`RefusedError` where the other side does not have the key, :class:`ChannelError` for anything that is not
what should come next (:class:`GoneError`: the end), ``OSError`` (``TimeoutError``) for what the network does. The connection
is of no use afterwards.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import os
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

MAGIC = b"elastictrain 1\n\0"
NONCE_BYTES = PROOF_BYTES = 32
HELLO_BYTES = len(MAGIC) + NONCE_BYTES  # what the side that connects says first
HANDSHAKE_SECONDS = 5.0
MAX_HEAD_BYTES = 64 << 20
MAX_BODY_BYTES = 4 << 20
T = TypeVar("T")
_LENGTHS = struct.Struct(">II")


class ChannelError(OSError):
    """The other side says something that it must not say here, or has gone."""


class RefusedError(ChannelError):
    """The other side does not have the key."""


class GoneError(ChannelError, ConnectionError):
    """The other side has hung up."""


@dataclass(frozen=True)
class Message:
    """What came in one frame. ``descriptor`` came with it over a Unix socket and belongs to whoever takes the message."""

    head: dict[str, Any]
    body: memoryview
    descriptor: int | None = None


def key_of(token: str) -> bytes:
    """The key that a run's token stands for."""
    return hashlib.sha256(b"elastictrain channel\0" + token.encode()).digest()


def proof(key: bytes, role: str, nonces: bytes) -> bytes:
    """By which a side (``client``, ``server``) shows that it has the key; ``nonces``: the client's, then the server's."""
    return _mac(key, role, nonces)


def is_proof(said: bytes, key: bytes, role: str, nonces: bytes) -> bool:
    return hmac.compare_digest(said, proof(key, role, nonces))


def packed(text: bytes, *, num_body: int = 0) -> bytes:
    """A frame up to its bytes: lengths and JSON."""
    assert len(text) <= MAX_HEAD_BYTES and num_body <= MAX_BODY_BYTES, (len(text), num_body)
    return _LENGTHS.pack(len(text), num_body) + text


def lengths_of(start: bytes) -> tuple[int, int]:
    """How long the JSON of a frame is, and its bytes, from its first eight."""
    head, body = _LENGTHS.unpack(start)
    return head, body


def object_of(text: bytes) -> dict[str, Any]:
    """The JSON object of a frame.

    Raises:
        ChannelError: it is none.
    """
    try:
        head = json.loads(text)
    except (ValueError, RecursionError):
        head = None
    if not isinstance(head, dict):
        raise ChannelError("a frame holds no JSON object")
    return head


class Seal:
    """The MACs of one side's frames, going out and coming in."""

    def __init__(self, key: bytes, *, role: str, nonces: bytes) -> None:
        mine, theirs = (_mac(key, f"frames of the {side}", nonces) for side in (role, _OTHER[role]))
        self._out, self._in = hmac.new(mine, digestmod="sha256"), hmac.new(theirs, digestmod="sha256")
        self._sent = self._received = 0

    def mac_of(self, start: bytes | memoryview, body: bytes | memoryview) -> bytes:
        """Of the next frame that is sent."""
        mac = self._out.copy()
        for part in (self._sent.to_bytes(8, "big"), start, body):
            mac.update(part)
        self._sent += 1
        return mac.digest()

    def is_mac_of(self, said: bytes, start: bytes, body: bytes | memoryview) -> bool:
        """Of the next frame that came in?"""
        mac = self._in.copy()
        for part in (self._received.to_bytes(8, "big"), start, body):
            mac.update(part)
        self._received += 1
        return hmac.compare_digest(said, mac.digest())


class Channel:
    """One side of a connection whose other side has proved to have the key. Make one by :meth:`connect` or :meth:`accept`.

    Several threads may send while one receives; each call's limit is its own. The socket does not block from then on.
    """

    def __init__(self, connection: socket.socket, *, key: bytes, role: str, nonces: bytes) -> None:
        self._connection = connection
        self._has_descriptors = connection.family == socket.AF_UNIX
        self._seal = Seal(key, role=role, nonces=nonces)
        self._sending = threading.Lock()

    @classmethod
    def connect(cls, connection: socket.socket, key: bytes, *, seconds: float = HANDSHAKE_SECONDS) -> Channel:
        """As the side that has connected.

        Raises:
            RefusedError: the other side has not proved to have the key.
        """
        connection.setblocking(False)
        deadline = time.monotonic() + seconds
        mine = secrets.token_bytes(NONCE_BYTES)
        _send_by(connection, MAGIC + mine, deadline)
        nonces = mine + _receive_by(connection, NONCE_BYTES, deadline)
        _send_by(connection, proof(key, "client", nonces), deadline)
        try:
            said = _receive_by(connection, PROOF_BYTES, deadline)
        except ConnectionError as error:
            raise RefusedError("the other side has hung up: it has another token") from error
        if not is_proof(said, key, "server", nonces):
            raise RefusedError("the other side has another token")
        return cls(connection, key=key, role="client", nonces=nonces)

    @classmethod
    def accept(cls, connection: socket.socket, key: bytes, *, seconds: float = HANDSHAKE_SECONDS) -> Channel:
        """As the side that was connected to.

        Raises:
            RefusedError: the other side has not proved to have the key; it was told nothing.
        """
        connection.setblocking(False)
        deadline = time.monotonic() + seconds
        hello = _receive_by(connection, HELLO_BYTES, deadline)
        if hello[: len(MAGIC)] != MAGIC:
            raise ChannelError("the other side speaks another language")
        mine = secrets.token_bytes(NONCE_BYTES)
        nonces = hello[len(MAGIC) :] + mine
        _send_by(connection, mine, deadline)
        if not is_proof(_receive_by(connection, PROOF_BYTES, deadline), key, "client", nonces):
            raise RefusedError("the other side has another token")
        _send_by(connection, proof(key, "server", nonces), deadline)
        return cls(connection, key=key, role="server", nonces=nonces)

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(
        self,
        head: Mapping[str, Any],
        body: bytes | memoryview = b"",
        *,
        descriptor: int | None = None,
        seconds: float | None = None,
    ) -> None:
        """One frame.

        Args:
            descriptor: goes along, over a Unix socket; it stays open here.
            seconds: how long the other side may take to make room; None: for ever.
        """
        start = memoryview(packed(json.dumps(head, separators=(",", ":")).encode(), num_body=len(body)))
        with self._sending:
            deadline = None if seconds is None else time.monotonic() + seconds
            mac = self._seal.mac_of(start, body)
            if descriptor is not None:
                sent = _until_done(
                    lambda: socket.send_fds(self._connection, [start[:1]], [descriptor]),
                    self._connection,
                    select.POLLOUT,
                    deadline,
                )
                start = start[sent:]
            for part in (start, body, mac):
                _send_by(self._connection, part, deadline)

    def receive(self, *, seconds: float | None = None, into: memoryview | None = None) -> Message:
        """The next frame.

        Args:
            seconds: how long it may take; None: for ever.
            into: takes the frame's bytes, which may be fewer; they are not to be believed if this raises.

        Raises:
            ChannelError: it is none, or too large; or the other side has gone.
        """
        deadline = None if seconds is None else time.monotonic() + seconds
        lengths, descriptors = self._receive_lengths(deadline)
        try:
            num_head, num_body = lengths_of(lengths)
            room = MAX_BODY_BYTES if into is None else min(MAX_BODY_BYTES, len(into))
            if num_head > MAX_HEAD_BYTES or num_body > room:
                raise ChannelError(f"a frame of {num_head} and {num_body} bytes, and there is room for {room}")
            text = _receive_by(self._connection, num_head, deadline)
            body = memoryview(bytearray(num_body)) if into is None else into[:num_body]
            _receive_into(self._connection, body, deadline)
            mac = _receive_by(self._connection, PROOF_BYTES, deadline)
            if not self._seal.is_mac_of(mac, lengths + text, body):
                raise ChannelError("a frame is not what was sent")
            head = object_of(text)
            if len(descriptors) > 1:
                raise ChannelError("a frame brings more than one descriptor")
        except BaseException:
            for one in descriptors:
                os.close(one)
            raise
        return Message(head, body, descriptors[0] if descriptors else None)

    def hang_up(self) -> None:
        """Nothing comes or goes any more; whoever receives in another thread learns it. :meth:`close` is still to come."""
        try:
            self._connection.shutdown(socket.SHUT_RDWR)  # a forked process may have inherited it
        except OSError:
            pass

    def close(self) -> None:
        self.hang_up()
        self._connection.close()

    def _receive_lengths(self, deadline: float | None) -> tuple[bytes, Sequence[int]]:
        if not self._has_descriptors:
            return _receive_by(self._connection, _LENGTHS.size, deadline), []
        data, descriptors = b"", list[int]()
        try:
            while len(data) < _LENGTHS.size:
                num_left = _LENGTHS.size - len(data)
                more, found, _, _ = _until_done(
                    lambda num_left=num_left: socket.recv_fds(self._connection, num_left, 4),  # type: ignore[misc]
                    self._connection,
                    select.POLLIN,
                    deadline,
                )
                descriptors += found
                if not more:
                    raise GoneError("the other side has gone")
                data += more
        except BaseException:
            for one in descriptors:
                os.close(one)
            raise
        for one in descriptors:
            os.set_inheritable(one, False)
        return data, descriptors


_OTHER = {"client": "server", "server": "client"}


def _mac(key: bytes, what: str, data: bytes) -> bytes:
    return hmac.digest(key, b"elastictrain " + what.encode() + b"\0" + data, "sha256")


def _until_done(action: Callable[[], T], connection: socket.socket, event: int, deadline: float | None) -> T:
    """``action()``, as soon as it need not wait. The socket's own timeout is not used: threads would share it."""
    while True:
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            raise TimeoutError("the other side takes too long")
        try:
            return action()
        except BlockingIOError:
            ready = select.poll()
            ready.register(connection, event)
            ready.poll(None if left is None else math.ceil(1000 * left))


def _send_by(connection: socket.socket, data: bytes | memoryview, deadline: float | None) -> None:
    view = memoryview(data).cast("B")
    while view:
        view = view[_until_done(lambda view=view: connection.send(view), connection, select.POLLOUT, deadline) :]  # type: ignore[misc]


def _receive_by(connection: socket.socket, num_bytes: int, deadline: float | None) -> bytes:
    data = bytearray(num_bytes)
    _receive_into(connection, memoryview(data), deadline)
    return bytes(data)


def _receive_into(connection: socket.socket, view: memoryview, deadline: float | None) -> None:
    while view:
        got = _until_done(lambda view=view: connection.recv_into(view), connection, select.POLLIN, deadline)  # type: ignore[misc]
        if not got:
            raise GoneError("the other side has gone")
        view = view[got:]
