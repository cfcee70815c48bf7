"""Do all workers stop at the same step, whatever the moment, and does nobody wait for ever?"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
import timeit
from pathlib import Path

from elastictrain.elastic import membership as membership_module
from elastictrain.elastic.agreement import Agreement, OnlyNode
from elastictrain.elastic.cells import ACKED, LIMIT, STEP, VERDICT, Cells, StopReason
from elastictrain.elastic.membership import current
from tests.elastic.lockstep import FORK, Nodes, assign, join, start, wait_for

LOCKSTEP = Path(__file__).with_name("lockstep.py")


def test_all_stop_at_one_step(tmp_path: Path) -> None:
    """160 rounds of 1 to 5 processes, asked by the agent or by a signal to any of them, at any moment."""
    env = {**os.environ, "PYTHONPATH": str(LOCKSTEP.parents[2])}
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
    plays = [
        subprocess.Popen(
            [sys.executable, str(LOCKSTEP), str(folder), str(seed), "80"], env=env, stderr=subprocess.PIPE, text=True
        )
        for seed, folder in enumerate(folders)
    ]
    for one in plays:
        _, errors = one.communicate(timeout=120)
        assert one.returncode == 0, errors


def test_two_nodes_agree_and_what_is_given_back_is_never_promised_again(tmp_path: Path) -> None:
    chance = random.Random(7)
    cancelled = 0
    for round_number in range(12):
        folders = [tmp_path / f"{round_number}-{node}" for node in range(2)]
        cells, nodes = [assign(folder, 2) for folder in folders], Nodes(2, chance)
        agreements = [
            Agreement(mine, node, why=lambda _: StopReason.CHANGE)
            for mine, node in zip(cells, nodes.nodes, strict=True)
        ]
        barrier = FORK.Barrier(4)
        how = {"seed": chance.randrange(10**6), "max_steps": 10**6, "stride": 1, "num_nodes": 2}
        pids = [start(folders[rank // 2], rank, 4, barrier, tmp_path, node=rank // 2, **how) for rank in range(4)]
        time.sleep(chance.random() * 0.02)

        def ask_again(cells: list[Cells] = cells, nodes: Nodes = nodes) -> None:
            if all(node.asked is None for node in nodes.nodes) and chance.random() < 0.1:
                nodes.ask(max(one.steps()[0] for one in cells) - 2)  # also below what was given back

        wait_for(pids, 0.001, *agreements, every=ask_again)
        ends = {(tmp_path / str(rank)).read_text() for rank in range(4)}
        (end,) = ends
        assert end.split()[::2] == [str(agreements[0].step), "change"]
        assert agreements[0].step == agreements[1].step
        cancelled += nodes.num_cancelled
    assert cancelled > 5, "nothing was given back"


def test_a_worker_that_left_the_limit_unseen_makes_it_rise(tmp_path: Path) -> None:
    """Rank 1 looked for a limit just before it was set; it is in the next step now and waits there for rank 0."""
    cells = assign(tmp_path / "run", 2)
    cells.views[0][STEP] = cells.views[1][STEP] = 1 + 5
    asks = OnlyNode()
    agreement = Agreement(cells, asks, why=lambda _: StopReason.PREEMPT)
    asks.step = 5
    asks.notice()
    agreement.tick()
    assert cells.views[0][LIMIT] == 1 + 6
    cells.views[0][STEP], cells.views[0][ACKED] = 1 + 6, 1 + 6
    cells.views[1][STEP] = 1 + 6
    agreement.tick()
    agreement.tick()
    assert cells.views[0][LIMIT] > 1 + 6
    assert cells.views[0][VERDICT] == 0


def test_a_second_boundary_of_one_step_is_not_the_limit(tmp_path: Path) -> None:
    """This worker left the first one unseen, where another may wait; it may not stop at the second one, apart."""
    cells = assign(tmp_path / "run", 1)
    said, say = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            mine = join(tmp_path / "run", rank=0, count=1)
            assert mine.boundary(6) is None
            while not mine._cell[LIMIT]:
                time.sleep(0.001)
            assert mine.boundary(6) is None
            assert mine._cell[ACKED] == 0
            os.write(say, b"it went on")
            while mine._cell[LIMIT] == 1 + 6:
                time.sleep(0.001)
            assert mine.boundary(7) is None
            assert mine._cell[ACKED] > 1 + 6
            code = 0
        finally:
            os._exit(code)
    while cells.steps() != [6]:
        time.sleep(0.001)
    cells.write(LIMIT, 1 + 6)
    os.close(say)  # so that a worker that ends without a word is heard, too
    with open(said, "rb") as words:
        assert words.read(10) == b"it went on"
    cells.write(LIMIT, 1 + 9)
    wait_for([pid], 0.005)


def test_a_boundary_costs_less_than_a_microsecond(tmp_path: Path) -> None:
    cells = assign(tmp_path / "run", 1)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            boundary = join(tmp_path / "run", rank=0, count=1).boundary
            best = min(timeit.repeat(lambda: boundary(1234567), number=20_000, repeat=20)) / 20_000
            (tmp_path / "cost").write_text(repr(best))
            code = 0
        finally:
            os._exit(code)
    wait_for([pid], 0.01)
    assert cells.steps() == [1234567]
    assert float((tmp_path / "cost").read_text()) < 1e-6


def test_a_second_membership_is_the_first(tmp_path: Path) -> None:
    """A script that trains twice is stopped in whichever training it is in."""
    cells = assign(tmp_path / "run", 1)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            mine = membership_module._mine = join(tmp_path / "run", rank=0, count=1)
            assert all(mine.boundary(step) is None for step in range(1, 10))
            mine.close()
            again = current()
            assert again is mine
            step = 1
            while again.boundary(step) is None:
                step += 1
                time.sleep(0.001)
            code = 0
        finally:
            os._exit(code)
    asks = OnlyNode()
    agreement = Agreement(cells, asks, why=lambda _: StopReason.INTERRUPT)
    time.sleep(0.1)
    asks.notice()
    wait_for([pid], 0.005, agreement)
    assert agreement.step is not None
