"""What an agent is told, and what it tells in the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from elastictrain.elastic.cells import StopReason
from elastictrain.elastic.report import Report

FROM_NEWEST = "from the newest checkpoint or snapshot"
LEFT_SUDDENLY = "this node has left while another one was lost; those that are left go on from their newest snapshot"
LOST = "what is newer than the newest checkpoint or snapshot is lost"
NODES_CHANGED = "nodes came or went"


@dataclass(frozen=True)
class AgentConfig:
    """What an agent runs.

    Args:
        command: the worker's command line.
        local_world_size: workers on this node.
        max_restarts: restarts without progress before the run fails.
        grace: seconds that workers get to come to a boundary and save when they are asked to stop.
        kill_after: seconds between SIGTERM and SIGKILL for the workers of a generation that is over.
        exit_within: seconds that a worker may take to exit after it has reported an error.
        settle: seconds to wait for a better explanation when a worker only says that it lost the others.
        tick: seconds between two looks.
        stall_seconds: without progress of any worker after which it is taken for a hang; 0: none is.
        num_spares: processes that have imported everything and wait for a worker's place.
        target, settings, node, job: handed to the workers, see :class:`~elastictrain.elastic.membership.Assignment`.
        keeper: the run's key and the name of the keeper that workers will ask for, where the agent can know them.
        started: when the command began, seconds since the epoch; None: when the agent is made.
    """

    command: Sequence[str]
    local_world_size: int = 1
    max_restarts: int = 3
    grace: float = 600.0
    kill_after: float = 2.0
    exit_within: float = 5.0
    settle: float = 2.0
    tick: float = 0.02
    stall_seconds: float = 0.0
    num_spares: int = 0
    target: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    node: str | None = None
    job: dict[str, Any] = field(default_factory=dict)
    keeper: tuple[bytes, str] | None = None
    started: float | None = None

    def all_but(self, num_living: int) -> str:
        """Those workers that are restarted, in words."""
        count = self.local_world_size
        if not num_living:
            return f"all {count} workers" if count > 1 else "the worker"
        return f"{count - num_living} of {count} workers (the others live on)"


@dataclass(frozen=True)
class Outcome:
    """How a run ended on this node.

    Args:
        code: exit code, see :mod:`elastictrain.errors`; 130 after a second Ctrl-C.
        step: most finished steps that any worker here has reached; -1 if none began to train.
        report: the error to show, if that is why it ended.
        message: one line for the person, where there is no report.
    """

    code: int
    step: int
    reason: StopReason | None = None
    report: Report | None = None
    message: str = ""
