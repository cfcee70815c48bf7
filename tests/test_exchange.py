"""Objects between ranks: what came out is what went in, small or long, and a peer that is gone is an error."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch.distributed as dist

from elastictrain import exchange
from elastictrain.exchange import SLOT
from tests.helpers import RankError, run_ranks


def values(rank: int) -> list[Any]:
    """As seen by every rank: small, just around a slot, long on one rank alone, on all, and in turns."""
    around = [b"x" * (SLOT + extra) for extra in range(-40, 3)]
    return [None, rank, *around, "y" * (9 * SLOT if rank == 1 else 1), list(range(3000)), "z" * (rank * SLOT)]


def test_every_rank_gets_what_was_sent() -> None:
    def talk(rank: int, world_size: int) -> None:
        dist.init_process_group("gloo", init_method="env://")
        everybody = list(zip(*map(values, range(world_size)), strict=True))
        for number, mine in enumerate(values(rank)):
            all_of_them = list(everybody[number])
            assert exchange.all_gather(mine) == all_of_them
            assert exchange.gather(mine) == (all_of_them if rank == 0 else None)
            assert exchange.scatter(all_of_them if rank == 0 else None) == mine
            for src in range(world_size):
                assert exchange.broadcast(mine if rank == src else "another", src=src) == all_of_them[src]

    run_ranks(talk, 3)


def test_a_peer_that_is_gone_is_an_error() -> None:
    def talk(rank: int, world_size: int) -> None:
        dist.init_process_group("gloo", init_method="env://")
        exchange.all_gather(rank)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        for one in (exchange.all_gather, exchange.gather):
            with pytest.raises(RuntimeError):
                one(rank)

    with pytest.raises(RankError, match="rank 1"):
        run_ranks(talk, 2)
