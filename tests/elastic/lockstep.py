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
from collections.abc import Callable
from multiprocessing.synchronize import Barrier
from pathlib import Path

from elastictrain.elastic.actions import Promise
from elastictrain.elastic.agreement import Agreement, OnlyNode
from elastictrain.elastic.cells import Cells, StopReason
from elastictrain.elastic.chain import Generation
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


class Nodes:
    """In place of a leader: asks all nodes at once, raises what one of them refuses, and changes its mind at random."""

    def __init__(self, num_nodes: int, chance: random.Random) -> None:
        self.nodes = [_Asks(self) for _ in range(num_nodes)]
        self._chance, self._ahead, self.num_cancelled = chance, 1, 0

    def ask(self, step: int) -> None:
        for node in self.nodes:
            node.asked, node.is_kept = Promise(0, step + self._ahead), False

    def answered(self, step: int, *, is_kept: bool) -> None:
        if not is_kept:
            self._ahead *= 2
            self.ask(step)
        elif self._chance.random() < 0.4 and self.num_cancelled < 3:
            self.num_cancelled += 1
            for node in self.nodes:
                node.asked = None
        elif all(node.is_kept for node in self.nodes):
            for node in self.nodes:
                assert node.asked is not None
                node.agreed = Generation(boundary=node.asked.boundary)


class _Asks:
    def __init__(self, all_nodes: Nodes) -> None:
        self._all = all_nodes
        self.asked: Promise | None = None
        self.agreed: Generation | None = None
        self.is_kept = False

    def promise(self, asked: Promise, *, is_kept: bool, step: int) -> None:
        if asked is self.asked:
            self.is_kept = is_kept
            self._all.answered(step, is_kept=is_kept)


def wait_for(pids: list[int], tick: float, *agreements: Agreement, every: Callable[[], None] = lambda: None) -> None:
    deadline = time.monotonic() + TOO_LONG
    left = list(pids)
    while left:
        every()
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
        max_steps = chance.choice([5, 40, 10_000_000, 10_000_000])
        folder = folder_of_all / str(round_number)
        cells = assign(folder, count)
        reason = chance.choice(list(StopReason))
        asks, barrier = OnlyNode(), FORK.Barrier(count)
        agreement = Agreement(cells, asks, why=lambda _, reason=reason: reason)
        how = {"seed": chance.randrange(10**6), "max_steps": max_steps, "stride": stride}
        pids = [start(folder, rank, count, barrier, folder, **how) for rank in range(count)]
        time.sleep(chance.random() * 0.03)
        in_place = all(view[0] for view in cells.views)  # handlers are
        if chance.random() < 0.5 and in_place and reason is not StopReason.CHANGE:
            os.kill(chance.choice(pids), signal.SIGINT if reason == StopReason.INTERRUPT else signal.SIGTERM)
        else:
            asks.notice()

        def every(cells: Cells = cells, asks: OnlyNode = asks) -> None:
            asks.step = max(cells.steps())
            if cells.asked() is not None:
                asks.notice()

        wait_for(pids, chance.choice([0.0, 0.001, 0.02]), agreement, every=every)

        ends = {(folder / str(rank)).read_text() for rank in range(count)}
        assert len(ends) == 1, f"workers ended apart: {ends}"
        (end,) = ends
        if end != "finished":
            step, _, why = end.split()
            assert why == reason.value
            assert agreement.step is not None
            assert agreement.step <= int(step) < agreement.step + stride  # the first boundary at or after the limit
            stopped += 1
            raised += asks._ahead > 2
        else:
            assert max_steps < 10_000_000, "nobody stopped"
    assert stopped >= num_rounds // 3
    assert raised >= 1, "the test never made a worker outrun the agent"


if __name__ == "__main__":
    play(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
    assert "torch" not in sys.modules
