"""Light workers in lockstep, for tests of the agreement. Run as a program (no torch: forks are cheap) it plays rounds.

python lockstep.py FOLDER SEED NUM_ROUNDS
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import signal
import sys
import time
import traceback
from multiprocessing.synchronize import Barrier
from pathlib import Path

from elastictrain.elastic.agreement import Agreement
from elastictrain.elastic.cells import Cells, StopReason
from elastictrain.elastic.line import Assignment, Line, Place, Speaker
from elastictrain.elastic.membership import AgentMembership

FORK = multiprocessing.get_context("fork")
TOO_LONG = 20.0  # seconds for one round; a normal one takes under 0.1


def join(folder: Path, *, rank: int, count: int, num_nodes: int = 1, node: int = 0) -> AgentMembership:
    """Become a worker of the test process."""
    per_node = count // num_nodes
    environment = {
        "RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_RANK": str(rank % per_node),
        "LOCAL_WORLD_SIZE": str(per_node),
        "GROUP_RANK": str(node),
    }
    place = Place(0, str(folder / "assignment.json"), environment)
    mine = AgentMembership(Line(Speaker().descriptor), place)
    mine.run()
    return mine


def assign(folder: Path, count: int) -> Cells:
    folder.mkdir()
    cells = Cells.create(str(folder / "cells"), count)
    Assignment(os.getpid(), 0, str(folder / "cells"), str(folder)).write(str(folder / "assignment.json"))
    return cells


def train(
    folder: Path, rank: int, count: int, barrier: Barrier, *, seed: int, max_steps: int, stride: int, **place: int
) -> str:
    """One worker in lockstep with the others: a barrier stands for a step's collectives. Returns where it stopped."""
    chance, chance_of_all = random.Random(seed * 100 + rank), random.Random(seed)
    pace = chance.choice([0.0, 0.0, 0.0003, 0.002])
    time.sleep(chance.random() * 0.01)
    mine = join(folder, rank=rank, count=count, **place)
    for step in range(stride, max_steps + 1, stride):
        if pace:
            time.sleep(chance.random() * pace)
        barrier.wait()
        if pace:
            time.sleep(chance.random() * pace)
        for again in range(1 + chance_of_all.choice([0, 0, 0, 1, 2])):  # an epoch that ends has a boundary of its own
            if (reason := mine.boundary(step)) is not None:
                assert mine.boundary(step + stride) is reason  # once stopped, always stopped
                return f"{step} {again} {reason.value}"
    mine.close()
    return "finished"


def start(folder: Path, rank: int, count: int, barrier: Barrier, out: Path, **how: int) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            gc.freeze()
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(int(TOO_LONG))  # no worker outlives a failed test
            (out / str(rank)).write_text(train(folder, rank, count, barrier, **how))
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return pid


def wait_for(pids: list[int], tick: float, *agreements: Agreement) -> None:
    deadline = time.monotonic() + TOO_LONG
    left = list(pids)
    while left:
        for agreement in agreements:
            agreement.tick()
        time.sleep(tick)
        for pid in list(left):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                assert status == 0, f"a worker ended with status {status}"
                left.remove(pid)
        assert time.monotonic() < deadline, "somebody waits for ever"


def play(folder_of_all: Path, seed: int, num_rounds: int) -> None:
    """Ask at a random moment, again and again; AssertionError when workers end apart, or not at all."""
    chance = random.Random(seed)
    stopped = raised = 0
    for round_number in range(num_rounds):
        count, stride = chance.randint(1, 5), chance.choice([1, 1, 1, 3])
        max_steps = chance.choice([5, 40, 100_000, 100_000])
        folder = folder_of_all / str(round_number)
        cells = assign(folder, count)
        agreement, barrier = Agreement(cells), FORK.Barrier(count)
        how = {"seed": chance.randrange(10**6), "max_steps": max_steps, "stride": stride}
        pids = [start(folder, rank, count, barrier, folder, **how) for rank in range(count)]
        time.sleep(chance.random() * 0.03)
        reason = chance.choice(list(StopReason))
        if chance.random() < 0.5 and all(view[0] for view in cells.views):  # handlers are in place
            os.kill(chance.choice(pids), signal.SIGINT if reason == StopReason.INTERRUPT else signal.SIGTERM)
        else:
            agreement.ask(reason)
        wait_for(pids, chance.choice([0.0, 0.001, 0.02]), agreement)

        ends = {(folder / str(rank)).read_text() for rank in range(count)}
        assert len(ends) == 1, f"workers ended apart: {ends}"
        (end,) = ends
        if end != "finished":
            step, _, why = end.split()
            assert why == reason.value
            assert agreement.step is not None
            assert agreement.step <= int(step) < agreement.step + stride  # the first boundary at or after the limit
            stopped += 1
            raised += agreement._margin > 2
        else:
            assert max_steps < 100_000, "nobody stopped"
    assert stopped >= num_rounds // 3
    assert raised >= 1, "the test never made a worker outrun the agent"


if __name__ == "__main__":
    play(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
    assert "torch" not in sys.modules
