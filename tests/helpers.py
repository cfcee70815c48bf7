"""Real ranks for tests: forked processes with torchrun's environment, on the loopback only, in bounded time.

    from tests.helpers import run_ranks

    def test_sum():
        assert run_ranks(_sum, 3) == [3.0, 3.0, 3.0]

    def _sum(rank: int, world_size: int) -> float:
        dist.init_process_group("gloo")
        ...

The ranks are forked from the test's process, which has already imported torch, so they start in milliseconds.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import multiprocessing
import multiprocessing.connection
import os
import pickle
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[1]

_GRACE = 3.0  # seconds the other ranks have, once one has failed, to say what they saw
_given: set[int] = set()


class RankError(AssertionError):
    """A rank raised, died or did not finish. The text holds each rank's traceback, the first to fail first."""


def apart(a: float, b: float) -> float:
    """Distance of two fp32 numbers as a part of their size: how sums are rounded depends on the kind of processor."""
    return abs(a - b) / max(1.0, abs(b))


def free_port() -> int:
    """A TCP port on the loopback that nobody listens on.

    From below the kernel's ephemeral range, so that no connection of another test takes it before its owner does.
    """
    source = random.SystemRandom()
    while True:
        port = source.randrange(12_000, 32_000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        if port not in _given:
            _given.add(port)
            return port


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 100.0,
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """Run ``fn(rank, world_size, *args)`` on ``world_size`` processes and return what each returned, by rank.

    Args:
        fn: any callable, a closure too. It may initialise the process group (``init_method="env://"``); a group that is
            left over when it returns is destroyed.
        args: inherited by the fork, never pickled. Results are pickled: tensors come back as copies.
        timeout: seconds for all ranks together. When they are over, every rank's Python stacks are collected and the
            ranks and their children are killed.
        env: more environment, over torchrun's variables.

    Raises:
        RankError: a rank raised, died or was late.
    """
    context = multiprocessing.get_context("fork")
    common = {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        **(env or {}),
    }
    ranks: list[_Rank] = []
    try:
        for rank in range(world_size):
            ours, theirs = context.Pipe(duplex=False)
            stacks = tempfile.TemporaryFile("w+")  # noqa: SIM115 - the rank writes to it, the parent closes it
            mine = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            process = context.Process(target=_child, args=(fn, rank, world_size, args, mine, theirs, stacks))
            process.start()
            theirs.close()
            ranks.append(_Rank(rank, process, ours, stacks))
        _collect(ranks, timeout)
    finally:
        for one in ranks:
            one.end()
    if failed := sorted((one for one in ranks if one.error is not None), key=lambda one: one.failed_at):
        raise RankError("\n".join(f"rank {one.rank} of {world_size}: {one.error}" for one in failed))
    return [one.result for one in ranks]


def begin_fork(seconds: float, stacks: IO[str] | None = None) -> None:
    """First thing in a forked child: leave the parent's garbage alone, and end with all stacks when time is over.

    The collector would run finalizers of the parent's objects here; some wait for threads that only the parent has.
    """
    gc.freeze()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # pytest's own
    faulthandler.dump_traceback_later(seconds, exit=True, file=stacks or sys.stderr)


def heed_ctrl_c() -> None:
    """In a new process, before its program: what runs in the background, as tests may, begins with SIGINT ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def elastictrain_command(
    *arguments: str | os.PathLike[str], check: bool = True, timeout: float = 150.0, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """The ``elastictrain`` command in a process of its own, in the root of the checkout.

    Raises:
        AssertionError: ``check``, and it did not end with 0; with all that it printed.
    """
    command = [
        sys.executable,
        "-c",
        "from elastictrain.cli.main import main; main()",
        *(os.fspath(argument) for argument in arguments),
    ]
    full = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **(env or {})}
    done = subprocess.run(command, cwd=ROOT, env=full, capture_output=True, text=True, timeout=timeout)
    assert not check or done.returncode == 0, f"{arguments}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def logged(run_dir: Path, name: str) -> dict[int, float]:
    """``{step: value}`` of one metric of a local run directory; a step that was logged twice fails."""
    values: dict[int, float] = {}
    for segment in sorted((run_dir / "metrics").glob("*.jsonl")):
        for line in map(json.loads, segment.read_text().splitlines()):
            if name in line:
                assert line["step"] not in values, f"{name} was logged twice at step {line['step']}"
                values[line["step"]] = line[name]
    return values


class _Rank:
    """One rank as the parent sees it."""

    def __init__(self, rank: int, process: ForkProcess, pipe: Connection, stacks: IO[str]) -> None:
        self.rank, self.process, self.pipe, self.stacks = rank, process, pipe, stacks
        self.done = False
        self.result: Any = None
        self.error: str | None = None
        self.failed_at = 0.0

    def receive(self) -> None:
        self.done = True
        try:
            good, value = pickle.loads(self.pipe.recv_bytes())
        except EOFError:
            self.process.join(5.0)
            self.fail(f"died without a word, exit code {self.process.exitcode}\n{self.read_stacks()}")
            return
        if good:
            self.result = value
        else:
            self.fail(value)

    def fail(self, error: str) -> None:
        self.error, self.failed_at = error, time.monotonic()

    def ask_for_stacks(self) -> None:
        if self.process.is_alive() and self.process.pid is not None:
            os.kill(self.process.pid, signal.SIGUSR2)

    def read_stacks(self) -> str:
        self.stacks.seek(0)
        return self.stacks.read() or "(no stacks)"

    def end(self) -> None:
        """Let a finished rank exit; kill one that is not, with the processes that it started."""
        self.process.join(5.0 if self.done else 0.0)
        if self.process.pid is not None:
            try:
                os.killpg(self.process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self.process.join()
        self.pipe.close()
        self.stacks.close()


def _collect(ranks: list[_Rank], timeout: float) -> None:
    deadline = time.monotonic() + timeout
    failed = False
    while waiting := {one.pipe: one for one in ranks if not one.done}:
        ready = multiprocessing.connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
        for pipe in ready:
            assert isinstance(pipe, Connection)
            waiting[pipe].receive()
        if not failed and any(one.error for one in ranks):
            failed, deadline = True, min(deadline, time.monotonic() + _GRACE)
        if not ready:
            _give_up([one for one in ranks if not one.done], f"{timeout:g} s" if not failed else None)
            return


def _give_up(late: list[_Rank], waited: str | None) -> None:
    for one in late:
        one.ask_for_stacks()
    time.sleep(0.3)  # time to write them
    for one in late:
        reason = f"not finished after {waited}" if waited else "still running when another rank had failed"
        one.fail(f"{reason}\n{one.read_stacks()}")


def _child(
    fn: Callable[..., Any],
    rank: int,
    world_size: int,
    args: tuple[Any, ...],
    env: Mapping[str, str],
    pipe: Connection,
    stacks: IO[str],
) -> None:
    gc.freeze()
    os.setpgid(0, 0)  # its loader processes are killed with it
    faulthandler.register(signal.SIGUSR2, file=stacks, all_threads=True)
    faulthandler.enable(file=stacks, all_threads=True)
    os.environ.update(env)
    torch.set_num_threads(1)
    try:
        message = pickle.dumps((True, fn(rank, world_size, *args)))
        if dist.is_initialized():
            dist.destroy_process_group()
    except BaseException:
        message = pickle.dumps((False, traceback.format_exc()))
    pipe.send_bytes(message)
    pipe.close()
