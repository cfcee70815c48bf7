"""Where agents meet, as torch.distributed.elastic's ``RendezvousHandler`` wants it.

:class:`LocalRendezvous` is one node that meets nobody: no store on the network, and a fresh port on loopback for every
generation. :class:`NodesRendezvous` is torch's c10d rendezvous for several nodes, made fit for restarts: every
generation's workers get a master address and port of their own (torch's shared store would hand them the addresses of
the generation before), and all agents agree on the generation's number.

On failure: what torch raises (``RendezvousError`` and its kinds), or a :class:`~elastictrain.errors.UsageError` for an
endpoint that cannot be reached.
"""

from __future__ import annotations

import os
import random
import socket
import time
import uuid

from torch.distributed import HashStore, PrefixStore, Store
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

from elastictrain.elastic.chain import Member
from elastictrain.errors import UsageError

LOOPBACK = "127.0.0.1"


class GenerationHandler(RendezvousHandler):
    """A handler that also knows the number of the generation it has just formed.

    Attributes:
        job_id: the same on all nodes and in all generations of this run, and in no other.
        address: this node's for the others; None: there are none.
        members: of this generation, in the order of their ranks, each with the number of its workers.
        rank: this node's place among them.
        waiting: inside :meth:`next_rendezvous`, where no worker runs and an interrupt may end the agent at once.
        began, formed: when the last rendezvous began and ended, seconds since the epoch.
    """

    generation: int = -1
    job_id: str = ""
    members: tuple[Member, ...] = ()
    rank: int = 0
    address: str | None = None
    waiting: bool = False
    began: float = 0.0
    formed: float = 0.0


class LocalRendezvous(GenerationHandler):
    """One node, with so many workers."""

    def __init__(self, num_workers: int = 1) -> None:
        self._store = HashStore()
        self.job_id = uuid.uuid4().hex
        self.members = (Member("local", workers=num_workers),)

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


class NodesRendezvous(GenerationHandler):
    """Several nodes that know one endpoint.

    Args:
        host, port: the endpoint; the agent on that host keeps the store.
        run_id: the same on all nodes of a run.
        local_addr: this node's address for the others; None: the one on the route to the endpoint.
        timeout: seconds to wait for ``min_nodes``.

    Raises:
        UsageError: nothing answers at the endpoint.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        min_nodes: int,
        max_nodes: int,
        run_id: str,
        local_addr: str | None = None,
        timeout: int = 600,
        last_call: int = 30,
    ) -> None:
        # The documented way out of sharing the agents' store with the workers, where stock restarts fail.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        self.address = local_addr or _address_towards(host, port)
        parameters = RendezvousParameters(
            "c10d",
            f"{host}:{port}",
            run_id,
            min_nodes,
            max_nodes,
            local_addr=self.address,
            join_timeout=timeout,
            last_call_timeout=last_call,
        )
        try:
            backend, self._store = create_backend(parameters)
        except RendezvousConnectionError as error:
            raise UsageError(
                f"--rdzv-endpoint {host}:{port}: nothing answers there; start the node with that address"
                " first, and let the others reach its port"
            ) from error
        self._handler = create_handler(self._store, backend, parameters)
        self.job_id = self._store.compare_set(f"elastictrain/{run_id}/job_id", "", uuid.uuid4().hex).decode()

    def get_backend(self) -> str:
        return self._handler.get_backend()

    def next_rendezvous(self) -> RendezvousInfo:
        self.waiting, self.began = True, time.time()
        try:
            return self._next_rendezvous()
        finally:
            self.waiting, self.formed = False, time.time()

    def _next_rendezvous(self) -> RendezvousInfo:
        info = self._handler.next_rendezvous()
        store: Store = info.store
        if info.rank == 0:
            store.set("generation", str(self._store.add("elastictrain/generations", 1) - 1))
        self.generation = int(store.get("generation"))
        port = free_port() if info.rank == 0 else None
        master = RendezvousStoreInfo.build(info.rank, PrefixStore("workers", store), self.address, port)
        return RendezvousInfo(store, info.rank, info.world_size, master)

    def is_closed(self) -> bool:
        return self._handler.is_closed()

    def set_closed(self) -> None:
        self._handler.set_closed()

    def num_nodes_waiting(self) -> int:
        return self._handler.num_nodes_waiting()

    def get_run_id(self) -> str:
        return self._handler.get_run_id()

    def shutdown(self) -> bool:
        return self._handler.shutdown()


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


def _address_towards(host: str, port: int) -> str:
    """This machine's address on the route to ``host``; its name where that would be loopback to others."""
    try:
        family, *_, remote = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(remote)  # sends nothing
            address = str(probe.getsockname()[0])
    except OSError as error:
        raise UsageError(f"--rdzv-endpoint {host}:{port}: the host name cannot be resolved ({error})") from error
    loopback = address.startswith("127.") or address == "::1"
    if loopback and host != "localhost" and not host.startswith("127.") and host != "::1":
        return socket.getfqdn()  # this is the host itself, whose name the machine maps to loopback
    return address


def trouble_of(error: Exception) -> str:
    """In words for the person who has started an agent."""
    if isinstance(error, RendezvousClosedError):
        return "another node has ended the run: see its output"
    if isinstance(error, RendezvousConnectionError):
        return "the rendezvous is gone with the node that keeps it (--rdzv-endpoint): see its output"
    if isinstance(error, RendezvousTimeoutError):
        return "not enough nodes came in time: start the command on --nnodes nodes"
    reason = (str(error) or type(error).__name__).splitlines()[0]
    return f"the agent cannot go on: {type(error).__name__}: {reason}"
