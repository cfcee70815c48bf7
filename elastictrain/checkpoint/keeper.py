"""The keeper of a node: holds the newest snapshots of its workers in memory, and gives them to whoever starts again.

It is a process of its own (:mod:`elastictrain.checkpoint.keeper_main`), so that it outlives workers and, for a while, the
agent. Workers hand it the shared memory that they have staged into; it hashes that, says that the snapshot is whole, and
has it copied to the keeper of another node. A start that looks for snapshots reads from it: through the same shared memory
on this node, through the network elsewhere. Everybody who speaks to it has proved to know the run's token. Imports no torch.

On failure: a connection that says what it must not say is closed, and what it had begun is forgotten. Nothing that a
connection does ends the keeper, but the agent's word.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from elastictrain.channel import Channel, ChannelError, Message
from elastictrain.checkpoint.blocks import Blocks
from elastictrain.checkpoint.copies import Copier, Tell, send_parts, take_copy
from elastictrain.checkpoint.found import peers_of
from elastictrain.checkpoint.held import About, Held, Store, count, text
from elastictrain.checkpoint.manifest import manifest_json
from elastictrain.checkpoint.marked import Marked

MAX_CONNECTIONS = 512
FIRST_SECONDS = 30.0  # for the agent to speak to a keeper that it has started
LINGER_SECONDS = 300.0  # for another agent to come, where the first one was killed
TELL_SECONDS = 5.0


class Keeper:
    """One keeper.

    Args:
        key: of the run's token.
        claim: the word of the agent that has started it: it comes first, and others may own it only when that has gone.
    """

    def __init__(self, key: bytes, *, claim: str) -> None:
        self._key, self._claim = key, claim
        self.store = Store()
        self.copier = Copier(key)
        self.rings: list[list[tuple[str, int]]] = []  # where all keepers of a generation are; of two, the newest first
        self._to_hash: queue.SimpleQueue[tuple[Held, Mapping[str, Any], Mapping[str, Any], bool, Tell]] = (
            queue.SimpleQueue()
        )
        self._connections = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._changed = threading.Condition()
        self._agent: Channel | None = None
        self._deadline = time.monotonic() + FIRST_SECONDS
        self._is_over = False
        threading.Thread(target=self._hash_all, name="hasher", daemon=True).start()

    def listen(self, server: socket.socket) -> None:
        """Take connections from a listening socket, in threads."""
        threading.Thread(target=self._accept_all, args=(server,), daemon=True).start()

    def wait(self) -> None:
        """Until the agent says so, or has been gone for too long."""
        with self._changed:
            while not self._is_over:
                left = None if self._agent is not None else self._deadline - time.monotonic()
                if left is not None and left <= 0:
                    return
                self._changed.wait(left)

    # ---- connections -------------------------------------------------------------------------------------------------

    def _accept_all(self, server: socket.socket) -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:  # out of descriptors, or the other side has gone already
                time.sleep(0.05)
                continue
            if not self._connections.acquire(blocking=False):
                connection.close()
                continue
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection:
                is_local = connection.family == socket.AF_UNIX
                if not is_local:
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                channel = Channel.accept(connection, self._key)
                _Conversation(self, channel, is_local=is_local).hold()
        except (OSError, ValueError):  # a stranger, a liar, or the end
            pass
        finally:
            self._connections.release()

    # ---- the agent ---------------------------------------------------------------------------------------------------

    def adopt(self, channel: Channel, *, claim: object, server: socket.socket | None) -> bool:
        """An agent wants to own this keeper. False: another one does, and lives."""
        with self._changed:
            if self._agent is not None or self._claim not in ("", claim):
                return False
            self._agent, self._claim = channel, ""
            self._changed.notify_all()
        if server is not None:
            self.listen(server)
        return True

    def left(self, channel: Channel, *, is_over: bool) -> None:
        """The agent has said its last word."""
        with self._changed:
            if self._agent is channel:
                self._agent = None
                self._deadline = time.monotonic() + LINGER_SECONDS
                self._is_over = self._is_over or is_over
                self._changed.notify_all()

    # ---- hashing -----------------------------------------------------------------------------------------------------

    def hash(
        self, held: Held, tensors: Mapping[str, Any], values: Mapping[str, Any], *, copies: bool, tell: Tell
    ) -> None:
        """In the background: make it whole, say so, and have it copied."""
        self._to_hash.put((held, tensors, values, copies, tell))

    def _hash_all(self) -> None:
        while True:
            held, tensors, values, copies, tell = self._to_hash.get()
            about = held.about
            blocks = Blocks.of(held.memory.view) if held.is_there else None
            if blocks is not None and held.is_there:  # it is still what it was before
                held.manifest = manifest_json(about.rank, about.world_size, blocks, tensors, values)
                tell({"is": "whole", "id": about.snapshot, "rank": about.rank})
                if copies:
                    self.copier.copy(held, tell)
            del held, tensors, values, tell  # the memory goes with its last user


class _Conversation:
    """What one connection says, and what it is answered."""

    def __init__(self, keeper: Keeper, channel: Channel, *, is_local: bool) -> None:
        self._keeper, self._channel = keeper, channel
        self._images: dict[int, tuple[Marked, Mapping[str, Any]]] = {}
        anybody: dict[str, Callable[[Message], None]] = {"list": self._list, "read": self._read, "copy": self._copy}
        this_node: dict[str, Callable[[Message], None]] = {
            "image": self._image,
            "snapshot": self._snapshot,
            "drop": self._drop,
            "forget": self._forget,
            "reject": self._reject,
            "buddy": self._buddy,
            "map": self._map,
            "adopt": self._adopt,
            "end": self._end,
        }
        self._kinds = {**anybody, **(this_node if is_local else {})}

    def hold(self) -> None:
        """Until the other side leaves, or says what it must not say."""
        try:
            while True:
                message = self._channel.receive()
                kind = message.head.get("kind")
                if message.descriptor is not None and kind not in ("image", "adopt"):
                    os.close(message.descriptor)
                if not isinstance(kind, str) or kind not in self._kinds:
                    raise ChannelError(f"no such word: {str(kind)[:50]}")
                self._kinds[kind](message)
        finally:
            self._keeper.left(self._channel, is_over=False)
            self._keeper.store.drop_replaced()
            self._images.clear()
            self._kinds.clear()  # they refer to this: memory is to go now, not when garbage is collected

    # ---- a worker ----------------------------------------------------------------------------------------------------

    def _image(self, message: Message) -> None:
        """Shared memory that snapshots will be staged into."""
        if message.descriptor is None:
            raise ChannelError("an image without its memory")
        try:
            number, num_bytes = count(message.head, "image"), count(message.head, "num_bytes")
            if not isinstance(tensors := message.head.get("tensors"), dict):
                raise ChannelError("an image without tensors")
        except ChannelError:
            os.close(message.descriptor)
            raise
        self._images[number] = (Marked(message.descriptor, num_bytes), tensors)

    def _snapshot(self, message: Message) -> None:
        """An image has been staged: hold it."""
        head = message.head
        about = About.from_json(head.get("about"))
        values = head.get("values")
        if (image := self._images.get(count(head, "image"))) is None or not isinstance(values, dict):
            raise ChannelError("a snapshot of an image that was never given, or without values")
        memory, tensors = image
        if memory.num_bytes != about.num_bytes:
            raise ChannelError(f"a snapshot of {about.num_bytes} bytes in an image of {memory.num_bytes}")
        held = Held(about, memory, count(head, "mark"), is_copy=False)
        is_needed = head.get("whole") is not True and head.get("base") is not None  # until one of this start is durable
        self._keeper.store.drop_older(about, base=text(head, "base") if is_needed else None)
        self._keeper.store.add(held)
        self._keeper.hash(held, tensors, values, copies=head.get("copies") is True, tell=self._tell)

    def _tell(self, said: Mapping[str, Any]) -> None:
        try:
            self._channel.send(said, seconds=TELL_SECONDS)
        except OSError:  # the worker has gone, or does not listen: half a frame cannot be taken back
            self._channel.hang_up()

    def _drop(self, message: Message) -> None:
        snapshot, rank = text(message.head, "id"), count(message.head, "rank")
        self._keeper.store.drop(
            lambda one: not one.is_copy and (one.about.snapshot, one.about.rank) == (snapshot, rank)
        )

    def _forget(self, message: Message) -> None:
        self._images.pop(count(message.head, "image"), None)

    def _reject(self, message: Message) -> None:
        snapshot = text(message.head, "id")
        self._keeper.store.drop(lambda one: one.about.snapshot == snapshot)

    def _buddy(self, message: Message) -> None:
        head = message.head
        is_there = head.get("host") is not None
        ring, rings = peers_of(head.get("ring", [])), self._keeper.rings
        if ring not in rings[:1]:  # every rank of this node says it
            self._keeper.rings = [ring, *rings[:1]]
        self._keeper.copier.set_buddy((text(head, "host"), count(head, "port", below=65536)) if is_there else None)

    # ---- a start that looks for snapshots ----------------------------------------------------------------------------

    def _list(self, message: Message) -> None:
        peers = dict.fromkeys(peer for ring in self._keeper.rings for peer in ring)
        said = {"peers": [{"host": host, "port": port} for host, port in peers]}
        self._channel.send({"held": [one.to_json() for one in self._keeper.store.whole()], **said}, seconds=30.0)

    def _find(self, message: Message) -> Held | None:
        held = self._keeper.store.find(text(message.head, "id"), count(message.head, "rank"))
        if held is None:
            self._channel.send({"is": "gone"}, seconds=30.0)
        return held

    def _read(self, message: Message) -> None:
        if (held := self._find(message)) is None:
            return
        is_manifest = message.head.get("what") == "manifest"
        data = memoryview(held.manifest) if is_manifest else held.memory.view
        start, end = count(message.head, "start"), count(message.head, "end")
        if not start <= end <= len(data):
            raise ChannelError(f"bytes {start} to {end} of {len(data)}")
        notes = {"notes": held.about.notes} if is_manifest else {}
        self._channel.send({"is": "there", **notes}, seconds=30.0)
        send_parts(self._channel, data[start:end], first=start)

    def _map(self, message: Message) -> None:
        if (held := self._find(message)) is not None:
            head = {"is": "there", "num_bytes": held.about.num_bytes}
            self._channel.send(head, descriptor=held.memory.descriptor, seconds=30.0)

    # ---- another keeper ----------------------------------------------------------------------------------------------

    def _copy(self, message: Message) -> None:
        take_copy(self._channel, message.head, self._keeper.store)

    # ---- the agent ---------------------------------------------------------------------------------------------------

    def _adopt(self, message: Message) -> None:
        server = None
        if message.descriptor is not None:
            try:
                server = socket.socket(fileno=message.descriptor)
            except OSError:  # it is none
                os.close(message.descriptor)
                raise
        is_mine = self._keeper.adopt(self._channel, claim=message.head.get("claim"), server=server)
        if not is_mine and server is not None:
            server.close()
        self._channel.send({"is": "adopted" if is_mine else "taken"}, seconds=30.0)

    def _end(self, message: Message) -> None:
        self._keeper.left(self._channel, is_over=True)
