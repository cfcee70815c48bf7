"""Where agents meet, as torch.distributed.elastic's ``RendezvousHandler`` wants it.

:class:`LocalRendezvous` is one node that meets nobody: no store on the network, and a fresh port on loopback for every
generation. Several nodes meet by :class:`~elastictrain.elastic.run_rendezvous.RunRendezvous`.

On failure: what torch raises, ``RendezvousError`` and its kinds.
"""

from __future__ import annotations

import random
import socket
import threading
import time
import uuid
from collections.abc import Callable

from torch.distributed import HashStore, PrefixStore
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from elastictrain.elastic.actions import Promise
from elastictrain.elastic.agreement import OnlyNode
from elastictrain.elastic.chain import Generation, Member

LOOPBACK = "127.0.0.1"


class LeftError(RendezvousClosedError):
    """This node was asked to go while it waited for others, and the run does without it now."""


class GenerationHandler(RendezvousHandler):
    """A handler that also knows the number of the generation it has just formed, and how this one shall end.

    Attributes:
        job_id: the same on all nodes and in all generations of this run, and in no other.
        address: this node's for the others; None: there are none.
        members: of this generation, in the order of their ranks, each with the number of its workers.
        rank: this node's place among them.
        reason: why this generation was formed, in words; empty where nobody came or went.
        is_planned: the one before had agreed on it, and on the step at which it ended.
        waiting: inside :meth:`next_rendezvous`, where no worker runs and an interrupt may end the agent at once.
        began, formed: when the last rendezvous began and ended, seconds since the epoch.
        stood_by: since when within it others trained without this node, or nobody could; None: that was never so.
        lost: host and pid of agents that were in this node's last generation and are not in this one, though nobody had
            planned it.
        loss_seconds: how long a loss may take to be known, where workers have lost a peer.
        asked, agreed: see :class:`~elastictrain.elastic.agreement.Asks`.
        is_superseded: a newer generation begins at once, whatever step workers are in.
        has_news: there is a newer generation, whenever it begins.
        closed: why the run is over for all nodes; empty: it is not.
        is_dismissed: somebody has asked for this node to go (:mod:`elastictrain.elastic.control`).
    """

    generation: int = -1
    job_id: str = ""
    members: tuple[Member, ...] = ()
    rank: int = 0
    address: str | None = None
    reason: str = ""
    is_planned: bool = False
    waiting: bool = False
    began: float = 0.0
    formed: float = 0.0
    stood_by: float | None = None
    lost: tuple[tuple[str, int], ...] = ()
    loss_seconds: float = 0.0

    @property
    def asked(self) -> Promise | None:
        return None

    @property
    def agreed(self) -> Generation | None:
        return None

    @property
    def is_superseded(self) -> bool:
        return False

    @property
    def has_news(self) -> bool:
        return False

    @property
    def num_known(self) -> int:
        """How many nodes the newest generation has."""
        return len(self.members)

    @property
    def is_out(self) -> bool:
        """Is this node no member of the newest one?"""
        return False

    @property
    def closed(self) -> str:
        return ""

    @property
    def is_dismissed(self) -> bool:
        return False

    def reached(self, step: int) -> None:
        """So many steps are finished by the furthest of this node's workers; -1: none yet."""

    def is_warm(self) -> bool:
        """Could this node's workers train at once? The agent puts its own answer here."""
        return True

    def check(self) -> None:
        """Called again and again inside :meth:`next_rendezvous`; what it raises ends that."""

    def workers_failed(self) -> None:
        """There shall be another generation: workers of this one have failed here."""

    def promise(self, asked: Promise, *, is_kept: bool, step: int) -> None:
        """The answer of this node's workers to ``asked``; see :class:`~elastictrain.elastic.actions.Promise`."""
        raise NotImplementedError

    def notice(self) -> None:
        """This node is to go: :attr:`agreed` will say at which step. The others go on."""
        raise NotImplementedError

    def lost_a_peer(self) -> None:
        """Workers say that they have lost others: look who is still there."""

    def end(self, reason: str) -> None:
        """The run is over, for all nodes."""

    @property
    def is_alone(self) -> bool:
        return len(self.members) == 1

    def is_in(self, generation: Generation) -> bool:
        """Is this node a member of it?"""
        return False


class LocalRendezvous(GenerationHandler):
    """One node, with so many workers."""

    def __init__(self, num_workers: int = 1) -> None:
        self._store = HashStore()
        self.job_id = uuid.uuid4().hex
        self.members = (Member("local", workers=num_workers),)
        self._only = OnlyNode()

    @property
    def asked(self) -> Promise | None:
        return self._only.asked

    @property
    def agreed(self) -> Generation | None:
        return self._only.agreed

    def reached(self, step: int) -> None:
        self._only.step = step

    def notice(self) -> None:
        self._only.notice()

    def promise(self, asked: Promise, *, is_kept: bool, step: int) -> None:
        self._only.promise(asked, is_kept=is_kept, step=step)

    def get_backend(self) -> str:
        return "local"

    def next_rendezvous(self) -> RendezvousInfo:
        self.began = self.formed = time.time()
        self.generation += 1
        store = PrefixStore(f"generation/{self.generation}", self._store)
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(LOOPBACK, free_port()))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return "local"

    def shutdown(self) -> bool:
        return True


class Meeting(threading.Thread):
    """Asks the first member of a generation where its workers meet, and begins at once.

    Attributes:
        info: the answer; None: there is none.
    """

    def __init__(self, generation: Generation, ask: Callable[[], RendezvousInfo | None]) -> None:
        super().__init__(name="meeting", daemon=True)
        self.generation, self._ask = generation, ask
        self.info: RendezvousInfo | None = None
        self.start()

    @property
    def has_failed(self) -> bool:
        return not self.is_alive() and self.info is None

    def run(self) -> None:
        self.info = self._ask()


def free_port() -> int:
    """A port that nobody listens on, outside the range that the system takes outgoing ports from.

    Workers take seconds to start before they listen on it; a port of that range could be gone by then.
    """
    try:
        with open("/proc/sys/net/ipv4/ip_local_port_range", encoding="ascii") as file:
            low = int(file.read().split()[0])
    except (OSError, ValueError, IndexError):
        low = 32768
    candidates = [random.randrange(10000, low) for _ in range(20)] if low > 12000 else []
    for port in [*candidates, 0]:
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise OSError("this machine has no free port")


def trouble_of(error: Exception) -> str:
    """In words for the person who has started an agent."""
    if isinstance(error, RendezvousClosedError):
        return f"the run has ended: {error}"
    if isinstance(error, RendezvousConnectionError):
        return f"this node cannot take part in the run any more: {error}"
    if isinstance(error, RendezvousTimeoutError):
        return "not enough nodes came in time: start the command on --nnodes nodes"
    reason = (str(error) or type(error).__name__).splitlines()[0]
    return f"the agent cannot go on: {type(error).__name__}: {reason}"
