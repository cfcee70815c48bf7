"""Nodes that a leader knows to be gone: lost, or let go and disconnected. Pure.

Members that are gone are in nobody's way: the others go on without them. Those that were members no more matter to
others for a little longer. They may have had state to hand over still, and whoever waits for that had better know, though
its own connections say nothing: these are told to all. A node that comes back is gone no more, and that is told as well.
"""

from __future__ import annotations

from collections import deque

from elastictrain.elastic.chain import Generation

MANY = 100  # nodes that were members no more, of which it is still of interest that they are gone


class Absent:
    """What one leader knows.

    Args:
        previous: the node that led before; its place is taken since it is lost.
        generation: the newest, as it was then.

    Attributes:
        told: nodes that are gone and were members no more, the newest of them: what all are told.
    """

    def __init__(self, previous: str | None, generation: Generation) -> None:
        self.told: deque[str] = deque(maxlen=MANY)
        self._gone: set[str] = set()
        self._with_notice: set[str] = set()
        self._is_told = True
        if previous is not None:
            self._gone.add(previous)
            if generation.number > 0 and generation.rank_of(previous) is None:
                self.told.append(previous)

    def __contains__(self, node: str) -> bool:
        return node in self._gone

    def gave_notice(self, node: str) -> bool:
        """Had it asked to leave?"""
        return node in self._with_notice

    def came(self, node: str) -> None:
        """It is there, or is there again."""
        self._gone.discard(node)
        if node in self.told:
            self.told.remove(node)
            self._is_told = False

    def went(self, node: str, *, with_notice: bool) -> None:
        """It is there no more."""
        self._gone.add(node)
        if with_notice:
            self._with_notice.add(node)

    def let_down(self, node: str) -> None:
        """It is gone and was a member no more: others may wait for what it had to hand over."""
        if node not in self.told:
            self.told.append(node)
        self._is_told = False

    def untold(self) -> tuple[str, ...] | None:
        """What all are to be told now; None: they have been."""
        if self._is_told:
            return None
        self._is_told = True
        return tuple(self.told)
