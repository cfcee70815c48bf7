"""The run's channel (:mod:`elastictrain.channel`) on an event loop: thousands of connections in one thread.

The same bytes on the wire as :class:`~elastictrain.channel.Channel`: a handshake in which both sides prove that they have
the key, then frames with a MAC each. No frame here has a body.

On failure: whatever is not what should come next closes the connection; nothing is answered. ``on_refused`` is told why,
and :class:`~elastictrain.elastic.node.RunNode` counts it.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Callable
from typing import Any

from elastictrain.channel import (
    HANDSHAKE_SECONDS,
    HELLO_BYTES,
    MAGIC,
    NONCE_BYTES,
    PROOF_BYTES,
    ChannelError,
    Seal,
    is_proof,
    lengths_of,
    object_of,
    packed,
    proof,
)

MAX_MESSAGE_BYTES = 16 << 20  # thousands of members, with room
MAX_STRANGERS = 256  # connections at a time that have not proved to have the key
CLOSE_SECONDS = 5.0
BACKLOG = 4096
LENGTHS_BYTES = 8


class Link(asyncio.Protocol):
    """One side of one connection.

    Args:
        on_open: called once both sides have proved to have the key.
        on_message: called with each message.
        on_closed: called at the end, open before or not.
        on_refused: called before that, with the reason, where the other side did not say what it should.
    """

    def __init__(
        self,
        key: bytes,
        *,
        is_client: bool,
        on_open: Callable[[Link], None],
        on_message: Callable[[Link, dict[str, Any]], None],
        on_closed: Callable[[Link], None],
        on_refused: Callable[[Link, str], None],
    ) -> None:
        self._key, self._is_client = key, is_client
        self._on_open, self._on_message = on_open, on_message
        self._on_closed, self._on_refused = on_closed, on_refused
        self._buffer = bytearray()
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._nonces = b""
        self._seal: Seal | None = None
        self._transport: asyncio.Transport | None = None
        self._timeout: asyncio.TimerHandle | None = None
        self._is_over = False
        self.address = "?"

    # ---- asyncio's side ----------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        peer = transport.get_extra_info("peername")
        self.address = str(peer[0]) if peer else "?"
        self._loop = asyncio.get_running_loop()
        self._timeout = self._loop.call_later(HANDSHAKE_SECONDS, self._late)
        if self._is_client:
            transport.write(MAGIC + self._nonce)

    def data_received(self, data: bytes) -> None:
        if self._is_over:
            return
        self._buffer += data
        try:
            while not self._is_over and (self._shake() if self._seal is None else self._take()):
                pass
        except ChannelError as error:
            self._refuse(str(error))

    def connection_lost(self, _error: Exception | None) -> None:
        if self._timeout is not None:
            self._timeout.cancel()
        self._is_over = True
        self._on_closed(self)

    # ---- ours --------------------------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        return self._seal is not None and not self._is_over

    def send(self, text: bytes) -> None:
        """One message, as JSON; nothing, once it is over."""
        if self.is_open:
            assert self._seal is not None and self._transport is not None
            start = packed(text)
            self._transport.write(start + self._seal.mac_of(start, b""))

    def close(self) -> None:
        """What was sent goes out, if the other side takes it soon."""
        self._is_over = True
        if self._transport is not None and not self._transport.is_closing():
            self._transport.close()
            self._loop.call_later(CLOSE_SECONDS, self._transport.abort)

    def _late(self) -> None:
        if self._seal is None:
            self._refuse("it does not prove in time that it has the token")

    def _refuse(self, why: str) -> None:
        self._is_over = True
        self._on_refused(self, why)
        if self._transport is not None:
            self._transport.abort()

    def _shake(self) -> bool:
        """A step of the handshake, if its bytes are there."""
        assert self._transport is not None
        if not self._nonces:
            expected = NONCE_BYTES if self._is_client else HELLO_BYTES
            if not self._is_client and not self._buffer[: len(MAGIC)] == MAGIC[: len(self._buffer)]:
                raise ChannelError("it speaks another language")
            if len(self._buffer) < expected:
                return False
            theirs = self._cut(expected)[-NONCE_BYTES:]
            if self._is_client:
                self._nonces = self._nonce + theirs
                self._transport.write(proof(self._key, "client", self._nonces))
            else:
                self._nonces = theirs + self._nonce
                self._transport.write(self._nonce)
            return True
        if len(self._buffer) < PROOF_BYTES:
            return False
        if not is_proof(self._cut(PROOF_BYTES), self._key, "server" if self._is_client else "client", self._nonces):
            raise ChannelError("it has another token")
        role = "client" if self._is_client else "server"
        if not self._is_client:
            self._transport.write(proof(self._key, "server", self._nonces))
        self._seal = Seal(self._key, role=role, nonces=self._nonces)
        assert self._timeout is not None
        self._timeout.cancel()
        self._on_open(self)
        return True

    def _take(self) -> bool:
        """A frame, if it is there; its length is looked at before the rest of it is waited for."""
        assert self._seal is not None
        if len(self._buffer) < LENGTHS_BYTES:
            return False
        num_head, num_body = lengths_of(bytes(self._buffer[:LENGTHS_BYTES]))
        if num_head > MAX_MESSAGE_BYTES or num_body:
            raise ChannelError(f"a frame of {num_head} and {num_body} bytes")
        end = LENGTHS_BYTES + num_head
        if len(self._buffer) < end + PROOF_BYTES:
            return False
        start, mac = self._cut(end), self._cut(PROOF_BYTES)
        if not self._seal.is_mac_of(mac, start, b""):
            raise ChannelError("a frame is not what was sent")
        self._on_message(self, object_of(start[LENGTHS_BYTES:]))
        return True

    def _cut(self, num_bytes: int) -> bytes:
        data = bytes(self._buffer[:num_bytes])
        del self._buffer[:num_bytes]
        return data


def listen(host: str, port: int = 0) -> socket.socket:
    """A listening socket for a node, on one address of this machine.

    Raises:
        OSError: the address is not this machine's, or somebody has the port.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    server = socket.socket(family, kind, protocol)
    try:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(address)
        server.listen(BACKLOG)
    except BaseException:
        server.close()
        raise
    return server
