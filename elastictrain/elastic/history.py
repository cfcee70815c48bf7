"""What an agent knows of its node's time. It tells the workers, who account for it, and the run directory when they cannot.

Workers are told what had come before their generation, by the moments in :class:`~elastictrain.elastic.line.Assignment`.
Beside that :class:`~elastictrain.metrics.presence.Presence` says what the node does, in case nobody else comes to tell.

Nothing here can fail.
"""

from __future__ import annotations

import os
from typing import Any

from elastictrain.elastic.agent_config import NODES_CHANGED
from elastictrain.elastic.cells import Cells, Phase
from elastictrain.elastic.membership import RUN_DIR
from elastictrain.elastic.rendezvous import GenerationHandler
from elastictrain.metrics.presence import Presence


class History:
    """Of one agent.

    Args:
        started: when its time began, seconds since the epoch.
        presence: is told what the node does.
    """

    def __init__(self, handler: GenerationHandler, presence: Presence, *, started: float) -> None:
        self._handler, self._presence = handler, presence
        self._moments = {"started": started}
        self._has_stood_by = False

    @property
    def _is_again(self) -> bool:
        """Have workers of this node trained before, and has that cost what came since?"""
        return "ended" in self._moments

    def waits(self) -> None:
        """Again and again inside a rendezvous."""
        stands_by = self._handler.stood_by
        is_price = self._is_again and not self._has_stood_by and stands_by is None
        self._presence.num_nodes = max(self._presence.num_nodes, self._handler.num_known + 1)
        self._presence.doing("rendezvous" if is_price else "waiting", since=stands_by or self._handler.began)

    def begins(self, folder: str, *, failure: str, was_handed_over: bool) -> dict[str, Any]:
        """A generation does: what its workers are told of the time before.

        Args:
            folder: the generation's.
            failure: on this node, that has ended the one before; empty: none.
            was_handed_over: that one has ended at the step that was agreed on.
        """
        handler = self._handler
        if self._has_stood_by:  # no failure has cost that time
            self._has_stood_by, self._moments = False, {"started": self._moments["ended"]}
        told = {**self._moments, "began": handler.began, "formed": handler.formed}
        if self._is_again and handler.stood_by is not None:
            told["stood_by"] = handler.stood_by
        if handler.is_planned and was_handed_over:
            told["planned"] = 1.0
        cause = failure or ((handler.reason or NODES_CHANGED) if self._is_again else "")
        self._presence.doing("rebuild" if self._is_again else "startup", since=handler.formed)
        self._presence.num_nodes = len(handler.members)
        self._presence.look_in(os.path.join(folder, RUN_DIR))
        self._moments["nodes"] = len(handler.members)
        return {"history": told, "cause": cause, "lost": handler.lost}

    def trains(self, cells: Cells, *, reached: int) -> None:
        """A look at the workers."""
        if reached >= 0:
            self._presence.reached = reached
            is_over = all(phase is Phase.CLOSED for phase in cells.phases())
            self._presence.doing("startup" if is_over else "productive")

    def stands_by(self) -> None:
        """The generation has ended as was agreed, and the others go on without this node."""
        self._has_stood_by = True

    def ended(self, at: float, *, reached: int, keeps: bool) -> None:
        """A generation has; ``keeps``: there may be another one."""
        self._moments |= {"ended": at, "reached": reached}
        self._presence.doing("detect" if keeps else "startup", since=at)
