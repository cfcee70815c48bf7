"""The tests' own tools: ranks that finish, raise, die and hang, and the S3 server."""

from __future__ import annotations

import os
import signal
import time

import fsspec
import pytest
import torch
import torch.distributed as dist

from tests.helpers import RankError, free_port, run_ranks


def test_results_come_by_rank_from_a_process_group() -> None:
    offset = 10

    def total(rank: int, world_size: int, weight: int) -> tuple[int, torch.Tensor]:
        dist.init_process_group("gloo")
        value = torch.tensor([float(rank * weight)])
        dist.all_reduce(value)
        return rank + offset, value

    results = run_ranks(total, 3, 2)
    assert [first for first, _ in results] == [10, 11, 12]
    assert all(torch.equal(value, torch.tensor([6.0])) for _, value in results)


def test_an_exception_comes_with_its_ranks_traceback() -> None:
    def fail(rank: int, world_size: int) -> None:
        dist.init_process_group("gloo")
        if rank == 1:
            raise ValueError("rank one's own words")
        dist.barrier()

    start = time.monotonic()
    with pytest.raises(RankError, match="(?s)rank 1 of 2: Traceback.*rank one's own words"):
        run_ranks(fail, 2)
    assert time.monotonic() - start < 10


def test_a_rank_that_hangs_is_killed_with_its_stacks() -> None:
    pids = run_ranks(lambda rank, world_size: os.getpid(), 1)
    assert pids[0] != os.getpid()

    def hang_in_here(rank: int, world_size: int) -> None:
        time.sleep(60 if rank == 0 else 0)

    with pytest.raises(RankError, match="(?s)rank 0 of 2: not finished after 0.5 s.*hang_in_here"):
        run_ranks(hang_in_here, 2, timeout=0.5)


def test_a_rank_that_dies_is_named_with_its_exit_code() -> None:
    with pytest.raises(RankError, match="rank 0 of 1: died without a word, exit code -9"):
        run_ranks(lambda rank, world_size: os.kill(os.getpid(), signal.SIGKILL), 1)


def test_no_port_is_given_twice() -> None:
    ports = [free_port() for _ in range(100)]
    assert len(set(ports)) == 100


def test_s3_is_reached_by_this_process_and_by_forked_ranks(s3_url: str) -> None:
    with fsspec.open(f"{s3_url}/hello", "wb") as file:
        file.write(b"from the parent")

    def read(rank: int, world_size: int) -> bytes:
        with fsspec.open(f"{s3_url}/hello", "rb") as file:
            data: bytes = file.read()
        return data

    assert run_ranks(read, 2) == [b"from the parent"] * 2
