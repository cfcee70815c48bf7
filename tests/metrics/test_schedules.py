"""Goodput of simulated runs: real books, ledgers and files, on a clock of their own, with faults of every kind."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elastictrain import Callback, CheckpointConfig, Trainer
from elastictrain.metrics import goodput as goodput_module
from elastictrain.metrics import ledger as ledger_module
from elastictrain.metrics.goodput import Goodput, TimeBook, goodput
from elastictrain.metrics.ledger import Ledger, condense_earlier, read_ledger
from elastictrain.rundir import RunDir
from tests.checkpoint.nodes import wait_until
from tests.metrics.test_goodput import Clock
from tests.trainer.tasks import Recorded, Samples

pytestmark = pytest.mark.filterwarnings("ignore")


class Schedule:
    """A run of some nodes over some starts, each of which ends in a fault; what it should cost is added up beside it.

    Attributes:
        there: node-seconds from each agent's beginning to the last thing that could be known of it.
        stalls: node-seconds of causes that are not steps, of what was written down.
    """

    def __init__(self, seed: int, run_dir: RunDir, clock: Clock) -> None:
        self.source, self.run_dir, self.clock = random.Random(seed), run_dir, clock
        self.number, self.step = 0, 0
        self.agents: dict[str, dict[str, float]] = {}  # by node: what its agent knows
        self.ends: dict[str, float] = {}
        self.began: dict[str, float] = {}
        self.stalls = {"data": 0.0, "checkpoint": 0.0, "restore": 0.0}

    def run(self) -> None:
        for generation in range(self.source.randint(2, 5)):
            self.start(generation, self.source.randint(1, 4))

    def wait(self, most: float) -> float:
        seconds = self.source.uniform(0.0, most)
        self.clock.now += seconds
        return seconds

    def start(self, generation: int, num_nodes: int) -> None:
        resumed = self.source.randint(max(0, self.step - 20), self.step)
        self.wait(3.0)
        for number in range(num_nodes):
            if f"n{number}" not in self.agents:
                self.join(f"n{number}")
        nodes = [f"n{number}-{self.agents[f'n{number}']['pid']:.0f}" for number in range(num_nodes)]
        began = self.clock.time()
        self.wait(2.0)
        formed = self.clock.time()
        books, ledgers = [], []
        for number, node in enumerate(nodes):
            history = self.agents[f"n{number}"]
            book = TimeBook.begin({**history, "began": began, "formed": formed})
            ledger = Ledger(self.run_dir, generation=generation, number=number, node=node)
            if number == 0:
                ledger.started(step=resumed, world_size=num_nodes)
            about = {"name": node, "host": node, "agent_pid": 1, "workers": []}
            ledger.opened(book, step=resumed, reached=int(history.get("reached", -1)), **about)
            self.began.setdefault(node, book.began)
            books.append(book)
            ledgers.append(ledger)
        self.wait(3.0)
        for book in books:
            book.settle()
        self.stalls["restore"] += num_nodes * self.wait(2.0)
        for book in books:
            book.spend("restore")
            book.doing = "productive"
        self.step = resumed
        self.train(nodes, books, ledgers)
        for node, book, ledger in zip(nodes, books, ledgers, strict=True):
            ledger.account(book, step=self.step, samples=0, tokens=0, now=True)
            self.ends[node] = book.began + sum(book.seconds.values())
            ledger.close()
        self.fail(num_nodes)

    def train(self, nodes: list[str], books: list[TimeBook], ledgers: list[Ledger]) -> None:
        for _ in range(self.source.randint(5, 60)):
            data = self.wait(1.0) if self.source.random() < 0.3 else 0.0
            self.wait(2.0)
            self.step += 1
            for book in books:
                book.settle(data=data)
            self.stalls["data"] += data * len(nodes)
            if self.source.random() < 0.1:
                self.stalls["checkpoint"] += len(nodes) * self.wait(1.0)
                for book in books:
                    book.spend("checkpoint")
            if self.source.random() < 0.5:
                for book, ledger in zip(books, ledgers, strict=True):
                    ledger.account(book, step=self.step, samples=0, tokens=0, now=True)

    def fail(self, num_nodes: int) -> None:
        """Workers die, having done a little more than they had written; some agents die with them."""
        unwritten = self.source.randint(0, 3)
        self.wait(4.0)
        for number in range(num_nodes):
            self.agents[f"n{number}"] |= {"ended": self.clock.time(), "reached": self.step + unwritten}
        self.step += unwritten
        for name in [*self.agents]:
            if self.source.random() < 0.3:
                del self.agents[name]

    def join(self, name: str) -> None:
        self.number += 1
        self.agents[name] = {"started": self.clock.time() - self.source.uniform(0, 2.0), "pid": float(self.number)}

    @property
    def there(self) -> float:
        return sum(self.ends[node] - self.began[node] for node in self.ends)


@pytest.mark.parametrize("seed", range(10))
def test_causes_add_up_to_wall_clock_times_nodes(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_module, "_MANY", 8)  # objects are put together meanwhile
    clock = Clock()
    monkeypatch.setattr(goodput_module, "time", clock)
    run_dir = RunDir(tmp_path)
    schedule = Schedule(seed, run_dir, clock)
    schedule.run()
    account = goodput(read_ledger(run_dir))
    assert account.total == pytest.approx(schedule.there, rel=0.01)
    for cause, seconds in schedule.stalls.items():
        assert account.seconds[cause] == pytest.approx(seconds, rel=0.01), cause
    assert account.seconds["productive"] > 0 and min(account.seconds.values()) > -1e-9
    condense_earlier(run_dir, 99)
    assert goodput(read_ledger(run_dir)).total == pytest.approx(account.total)


# ---- stalls of known length in real training -----------------------------------------------------------------------


class Stalls(Recorded):
    """Nothing, or so many seconds, at the places that are asked for."""

    def __init__(self, pause: Callable[[str], None], run_dir: Path) -> None:
        super().__init__()
        self.pause, self.run_dir = pause, run_dir
        self.marks: list[tuple[int, float]] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        step = self.trainer.global_step
        self.marks.append((step, time.monotonic()))
        if step and not step % 2:  # the last step begins, and its end would wait for what is still being written
            wait_until(lambda: any(self.run_dir.glob(f"checkpoints/step-{step:08d}/*/COMMIT")), seconds=60.0)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.marks.append((self.trainer.global_step, time.monotonic()))

    def between(self, step: int) -> float:
        """Seconds from the end of a step to the beginning of the next one."""
        mine = [when for number, when in self.marks if number == step]
        return max(after - before for before, after in itertools.pairwise(mine))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.pause("checkpoint")

    def on_validation_start(self) -> None:
        self.pause("validation")

    def train_dataset(self) -> Any:
        return Late(self.pause)


class Late(Samples):
    """One sample takes its time."""

    def __init__(self, pause: Callable[[str], None]) -> None:
        self.pause = pause

    def __getitem__(self, index: int) -> Any:
        if index == 60:
            self.pause("data")
        return super().__getitem__(index)


class SlowToLoad(Callback):
    """Takes its time to take its state back, which is a part of restoring."""

    def __init__(self, pause: Callable[[str], None]) -> None:
        self.pause = pause

    def state_dict(self) -> dict[str, Any]:
        return {"is": "here"}

    def load_state_dict(self, state: Any) -> None:
        self.pause("restore")


@pytest.mark.slow
def test_a_stall_of_known_length_is_told_within_a_tenth(tmp_path: Path) -> None:
    """What a run with a stall takes for its cause, less what the same run takes without, is the stall's length.

    A save takes more or less time by itself, so what is told lies between the stall and the time between
    the steps on both sides of the save.
    """
    taken = dict.fromkeys(("data", "checkpoint", "validation", "restore"), 0.0)
    saving = 0.0

    def spent(name: str, *, stalls: bool) -> Goodput:
        nonlocal saving
        done: set[str] = set()

        def pause(cause: str) -> None:
            if stalls and cause not in done:  # once in the run
                done.add(cause)
                began = time.monotonic()
                time.sleep(2.0)
                taken[cause] += time.monotonic() - began

        for steps in (3, 5):  # saved are steps 2 and 4, and the second start goes on from the first of them
            config = CheckpointConfig(every_steps=2, every_seconds=None, at_end=False)
            options: dict[str, Any] = {"global_batch_size": 24, "log_every": 1, "val_every": 9, "checkpoint": config}
            task = Stalls(pause, tmp_path / name)
            Trainer(run_dir=str(task.run_dir), max_steps=steps, callbacks=[SlowToLoad(pause)], **options).fit(task)
            saving += task.between(steps - 1) * stalls
        return goodput(read_ledger(RunDir(tmp_path / name)))

    spent("warm-up", stalls=False)
    without, with_them = spent("plain", stalls=False), spent("stalled", stalls=True)
    assert min(taken.values()) >= 1.99, taken
    assert taken.pop("checkpoint") <= with_them.seconds["checkpoint"] <= saving, (
        "no more than there was between the steps"
    )
    for cause, seconds in taken.items():
        assert with_them.seconds[cause] - without.seconds[cause] == pytest.approx(seconds, rel=0.1), cause
