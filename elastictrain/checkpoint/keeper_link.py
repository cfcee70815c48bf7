"""A worker's way to its node's keeper, which may be started anew behind its back. Imports no torch.

On failure: a link that is not open has :attr:`KeeperLink.trouble`, and :meth:`KeeperLink.open` tries again, after a pause
that grows, so that a keeper that hangs does not hold up every step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from elastictrain.channel import Channel
from elastictrain.checkpoint.keeper_process import connect_local, speaks

CONNECT_SECONDS = 2.0
SEND_SECONDS = 5.0
LONGEST_PAUSE = 60.0

Address = Mapping[str, Any]


class KeeperLink:
    """One connection at a time.

    Args:
        find: where the keeper is now, as the agent says; None while there is none.

    Attributes:
        address: where it was found last.
        trouble: why it is not open.
    """

    def __init__(self, find: Callable[[], Address | None], key: bytes) -> None:
        self._find, self._key = find, key
        self._channel: Channel | None = None
        self._pause, self._next = 0.0, 0.0
        self.address: Address | None = None
        self.trouble = ""

    @property
    def key(self) -> bytes:
        return self._key

    @property
    def is_open(self) -> bool:
        return self._channel is not None

    @property
    def channel(self) -> Channel | None:
        """For questions, while the keeper says nothing unasked: before there is a snapshot. :meth:`close` closes it."""
        return self._channel

    def open(self, *, seconds: float = CONNECT_SECONDS) -> bool:
        """Try, if it is not open; is it now?"""
        if self._channel is None and time.monotonic() >= self._next:
            self.address = self._find()
            if self.address is None:
                self.trouble = "this node has no keeper"
            else:
                try:
                    self._channel = connect_local(self.address["socket"], self._key, seconds=seconds)
                    self._pause, self.trouble = 0.0, ""
                except OSError as error:
                    self.trouble = f"this node's keeper does not answer ({error})"
                    self._pause = min(max(1.0, 2 * self._pause), LONGEST_PAUSE)
                    self._next = time.monotonic() + self._pause
        return self.is_open

    def send(self, head: Mapping[str, Any], *, descriptor: int | None = None) -> None:
        """
        Raises:
            OSError: it has gone, or does not take what it is sent; the link is closed.
        """
        if self._channel is None:
            raise ConnectionError(self.trouble)
        try:
            self._channel.send(head, descriptor=descriptor, seconds=SEND_SECONDS)
        except OSError as error:
            self._lost(error)
            raise

    def try_to_send(self, head: Mapping[str, Any]) -> None:
        """The same, and nothing is raised."""
        try:
            self.send(head)
        except OSError:
            pass

    def answer(self, *, seconds: float = SEND_SECONDS) -> dict[str, Any]:
        """The one thing that it says when it was asked; empty where it says nothing, and the link is closed then."""
        if self._channel is None:
            return {}
        try:
            return self._channel.receive(seconds=seconds).head
        except OSError as error:
            self._lost(error)
            return {}

    def hear(self) -> list[dict[str, Any]]:
        """What it has said since. Waits for nothing."""
        said = []
        while self._channel is not None and speaks(self._channel):
            try:
                said.append(self._channel.receive(seconds=SEND_SECONDS).head)
            except OSError as error:
                self._lost(error)
        return said

    def wait(self, seconds: float) -> None:
        """Until it says something, or so long."""
        if self._channel is not None:
            speaks(self._channel, seconds=seconds)

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _lost(self, error: OSError) -> None:
        self.close()
        self.trouble = f"this node's keeper is gone ({error})"
