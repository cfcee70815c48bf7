"""Copies of images, from one node's keeper to its buddy's, in the background. Imports no torch.

    →  copy: which image, how large, how long its manifest     ←  go, or refused
    →  the manifest, then the image, in parts in order          ←  whole, once every block was compared with its hash

On failure: the sender tells the worker why there is no copy of this snapshot and goes on with the next one; the receiver
forgets what it had of it. Nothing is tried twice but a connection that had been open before.
"""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any

from elastictrain.channel import MAX_BODY_BYTES, Channel, ChannelError, GoneError, Message
from elastictrain.checkpoint.held import MAX_MANIFEST_BYTES, About, Held, Store, count
from elastictrain.checkpoint.manifest import DamagedError, Manifest

CONNECT_SECONDS = 5.0
PART_SECONDS = 30.0  # that the other side may take for one part
WHOLE_SECONDS = 600.0  # for all blocks to be compared

Tell = Callable[[Mapping[str, Any]], None]


def connect(
    host: str, port: int, key: bytes, *, seconds: float = CONNECT_SECONDS, answer_seconds: float | None = None
) -> Channel:
    """To the keeper there.

    Args:
        answer_seconds: that it may take once its machine has answered; None: as long.

    Raises:
        OSError: nothing answers, or it has another token.
    """
    connection = socket.create_connection((host, port), timeout=seconds)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        return Channel.connect(connection, key, seconds=seconds if answer_seconds is None else answer_seconds)
    except BaseException:
        connection.close()
        raise


class Copier:
    """Sends images to the buddy, one after the other.

    Attributes:
        reached: called with "part" before each part of an image; a test's way to interrupt there.
    """

    reached: Callable[[str], None] = staticmethod(lambda point: None)

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._buddy: tuple[str, int] | None = None
        self._channel: tuple[tuple[str, int], Channel] | None = None
        self._queue: queue.SimpleQueue[tuple[Held, Tell]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="copier", daemon=True).start()

    def set_buddy(self, buddy: tuple[str, int] | None) -> None:
        self._buddy = buddy

    def copy(self, held: Held, tell: Tell) -> None:
        """Send it; ``tell`` hears "copied", or "uncopied" and why."""
        self._queue.put((held, tell))

    def _run(self) -> None:
        while True:
            self._try(*self._queue.get())  # nothing of it is kept while this waits: the memory goes with its last user

    def _try(self, held: Held, tell: Tell) -> None:
        said = {"id": held.about.snapshot, "rank": held.about.rank}
        try:
            self._send(held)
        except Exception as error:  # whatever it is: the next one is tried
            self._hang_up()
            where = "" if self._buddy is None else f" at {self._buddy[0]}:{self._buddy[1]}"
            tell({"is": "uncopied", **said, "text": f"the buddy's keeper{where}: {error or type(error).__name__}"})
        else:
            tell({"is": "copied", **said})

    def _send(self, held: Held) -> None:
        buddy = self._buddy
        if buddy is None:
            raise ChannelError("there is none")
        head = {"kind": "copy", "about": held.about.to_json(), "manifest_bytes": len(held.manifest)}
        channel, answer = self._begin(buddy, head)
        _expect(answer, "go")
        send_parts(channel, memoryview(held.manifest))
        self._send_image(channel, held)
        _expect(channel.receive(seconds=WHOLE_SECONDS), "whole")

    def _begin(self, buddy: tuple[str, int], head: Mapping[str, Any]) -> tuple[Channel, Message]:
        """The connection, and the buddy's answer."""
        if self._channel is not None and self._channel[0] == buddy:
            try:
                return self._channel[1], self._ask(self._channel[1], head)
            except GoneError:  # it has been started anew since
                pass
        self._hang_up()
        channel = connect(*buddy, self._key)
        self._channel = (buddy, channel)
        return channel, self._ask(channel, head)

    def _send_image(self, channel: Channel, held: Held) -> None:
        for start in range(0, held.about.num_bytes, MAX_BODY_BYTES):
            self.reached("part")
            if not held.is_there:
                raise ChannelError("it was replaced before it was copied")
            part = held.memory.view[start : min(start + MAX_BODY_BYTES, held.about.num_bytes)]
            channel.send({"start": start}, part, seconds=PART_SECONDS)

    @staticmethod
    def _ask(channel: Channel, head: Mapping[str, Any]) -> Message:
        channel.send(head, seconds=PART_SECONDS)
        return channel.receive(seconds=PART_SECONDS)

    def _hang_up(self) -> None:
        if self._channel is not None:
            self._channel[1].close()
            self._channel = None


def take_copy(channel: Channel, head: Mapping[str, Any], store: Store) -> None:
    """The buddy's side, once "copy" has come.

    Raises:
        OSError: what comes is not what was announced, or no more comes.
    """
    about = About.from_json(head.get("about"))
    manifest_bytes = count(head, "manifest_bytes", below=MAX_MANIFEST_BYTES)
    try:
        memory, mark = store.room_for_copy(about)
    except OSError as error:
        channel.send({"is": "refused", "text": str(error)}, seconds=PART_SECONDS)
        return
    channel.send({"is": "go"}, seconds=PART_SECONDS)
    manifest = receive_parts(channel, manifest_bytes)
    try:
        blocks = Manifest.from_json(manifest, rank=about.rank, world_size=about.world_size).blocks
        if blocks.num_bytes != about.num_bytes:
            raise DamagedError(f"a manifest of {blocks.num_bytes} bytes for an image of {about.num_bytes}")
    except DamagedError as error:
        raise ChannelError(str(error)) from error
    receive_parts_into(channel, memory.view)
    if (bad := blocks.damage(0, memory.view)) is not None:
        channel.send({"is": "refused", "text": f"bytes {bad[0]} to {bad[1]} differ from their hash"})
        return
    memory.mark = mark
    store.add(Held(about, memory, mark, is_copy=True, manifest=manifest))
    channel.send({"is": "whole"}, seconds=PART_SECONDS)


# ---- bytes in parts -------------------------------------------------------------------------------------------------


def send_parts(channel: Channel, data: memoryview, *, first: int = 0) -> None:
    """``data`` in as many frames as it takes; ``first`` is the place of its first byte."""
    for start in range(0, len(data), MAX_BODY_BYTES):
        channel.send({"start": first + start}, data[start : start + MAX_BODY_BYTES], seconds=PART_SECONDS)


def receive_parts(channel: Channel, num_bytes: int) -> bytes:
    """So many bytes; memory is taken as they come."""
    data = bytearray()
    while len(data) < num_bytes:
        message = channel.receive(seconds=PART_SECONDS)
        _check_part(message, len(data), num_bytes - len(data))
        data += message.body
    return bytes(data)


def receive_parts_into(channel: Channel, view: memoryview, *, first: int = 0) -> None:
    """As many bytes as ``view`` has. What is in it is not to be believed if this raises."""
    place = 0
    while place < len(view):
        message = channel.receive(seconds=PART_SECONDS, into=view[place:])
        _check_part(message, first + place, len(view) - place)
        place += len(message.body)


def _check_part(message: Message, start: int, most: int) -> None:
    if message.head.get("start") != start or not 0 < len(message.body) <= most:
        raise ChannelError(
            f"expected bytes from {start} on and got {str(message.head)[:200]} with {len(message.body)} bytes"
        )


def _expect(message: Message, what: str) -> None:
    if message.head.get("is") != what:
        raise ChannelError(str(message.head.get("text", message.head))[:200])
