"""Where the ranks of a generation meet: a store at ``MASTER_ADDR:MASTER_PORT``, which rank 0 keeps, or torchrun.

On failure: :class:`~elastictrain.errors.GenerationOver` where nobody is left to meet; torch's ``DistError`` else.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import DistNetworkError, Store, TCPStore
from torch.distributed.rendezvous import rendezvous

from elastictrain.errors import GenerationOver

SOON, LATER = 0.001, 0.01  # seconds between two looks whether rank 0 is there; those who wait for it train no sooner
SHARE = 0.1  # of what was waited already, in between
MOST_LOOKS, RAREST = 10_000, 0.1  # of all ranks together, a second; but seconds between two at most


def meet(rank: int, world_size: int, *, timeout: timedelta, is_over: Callable[[], bool], binds: bool) -> Store:
    """The store of this generation.

    Args:
        is_over: whether there is anybody left to meet.
        binds: rank 0 listens at ``MASTER_ADDR`` alone. Else it listens at every address of its machine, as torch does: a
            name may mean another address there than it does elsewhere.

    Raises:
        GenerationOver: there is not.
        DistNetworkError: nobody can listen there.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store, _, _ = next(iter(rendezvous("env://", rank, world_size, timeout=timeout)))
        kept: Store = store
        return kept
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if rank > 0:
        _wait_for_store(host, port, timeout.total_seconds(), is_over, least=min(world_size / MOST_LOOKS, RAREST))
    listener = _listen(host, port) if rank == 0 and binds else None
    # rank 0 does not wait for the others here, where nothing could let it go
    return TCPStore(host, port, is_master=rank == 0, wait_for_workers=False, timeout=timeout, master_listen_fd=listener)


def _listen(host: str, port: int) -> int:
    """The descriptor of a socket that listens there."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=socket.SOMAXCONN).detach()
    except OSError as error:
        raise DistNetworkError(f"rank 0 cannot listen at {host} port {port}: {error}") from error


def _wait_for_store(host: str, port: int, seconds: float, is_over: Callable[[], bool], *, least: float) -> None:
    """Until somebody listens where the store shall be: torch's own client cannot be interrupted while nobody does.

    Args:
        least: seconds between two looks, at first.
    """
    began = time.monotonic()
    while (waited := time.monotonic() - began) < seconds:
        if is_over():
            raise GenerationOver("the generation is over before its ranks have met")
        try:
            socket.create_connection((host, port), timeout=1.0).close()
            return
        except OSError:
            time.sleep(max(least, min(max(SOON, waited * SHARE), LATER)))
