"""Every second has one cause, and the causes add up: of a book, of a ledger with holes, of runs."""

from __future__ import annotations

import itertools
import json
import os
import random
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elastictrain import Callback, CheckpointConfig, Trainer
from elastictrain.accounting import Account
from elastictrain.callback import StepInfo
from elastictrain.cli.main import _main
from elastictrain.metrics import courier
from elastictrain.metrics import earlier as earlier_module
from elastictrain.metrics import goodput as goodput_module
from elastictrain.metrics import ledger as ledger_module
from elastictrain.metrics.goodput import CAUSES, Goodput, Recent, TimeBook, goodput, stretches
from elastictrain.metrics.ledger import Ledger, read_ledger
from elastictrain.metrics.status import SILENT, doing_in_words, status
from elastictrain.metrics.timeline import timeline
from elastictrain.rundir import RunDir
from elastictrain.session import Counters, Recovery, Session
from tests.helpers import logged, run_ranks
from tests.trainer.tasks import Recorded, Samples

pytestmark = pytest.mark.filterwarnings("ignore")


class Clock:
    """``time`` as the book sees it."""

    def __init__(self) -> None:
        self.now, self.set_by = 1000.0, 0.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return 1e9 + self.now + self.set_by


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(goodput_module, "time", clock)
    return clock


def test_whatever_is_entered_adds_up(clock: Clock) -> None:
    source = random.Random(0)
    book, began, taken = TimeBook(), clock.now, 0.0
    for _ in range(2000):
        clock.now += source.expovariate(1.0)
        clock.set_by += source.choice([0.0, 0.0, -3600.0, 50.0])  # somebody sets the clock
        cause, other = source.sample(list(CAUSES), 2)
        kind = source.randrange(4)
        if kind == 0:
            book.spend(cause)
        elif kind == 1:
            book.split({cause: source.uniform(-1, 3), other: source.uniform(0, 3)}, rest=source.choice(list(CAUSES)))
        elif kind == 2:
            book.move(source.uniform(-1, 2), source=cause, to=other)
        else:
            book.settle(data=source.uniform(0, 1))
            line = book.take()
            assert sum(line["seconds"].values()) == pytest.approx(line["to"] - line["from"], abs=1e-6)
            assert min(line["seconds"].values(), default=0.0) >= -1e-9
            taken += line["to"] - line["from"]
    book.settle()
    line = book.take()
    taken += line["to"] - line["from"]
    assert sum(book.seconds.values()) == pytest.approx(clock.now - began)
    assert taken == pytest.approx(clock.now - began)


def test_it_goes_back_to_what_the_agent_knows(clock: Clock) -> None:
    now = clock.time()
    first = TimeBook.begin({"started": now - 30, "began": now - 22, "formed": now - 10})
    clock.now += 5
    first.settle()
    assert {c: s for c, s in first.seconds.items() if s} == pytest.approx({"startup": 8 + 15, "waiting": 12})
    now = clock.time()
    again = TimeBook.begin({"started": now - 99, "ended": now - 9, "began": now - 7, "formed": now - 4, "reached": 3})
    clock.now += 1
    again.settle()
    clock.now += 2
    again.spend("restore")
    spent = {c: s for c, s in again.seconds.items() if s}
    assert spent == pytest.approx({"detect": 2, "rendezvous": 3, "rebuild": 5, "restore": 2})
    now = clock.time()
    stood = TimeBook.begin({"started": 0, "ended": now - 9, "began": now - 7, "stood_by": now - 6, "formed": now - 1})
    clock.now += 1
    stood.settle()
    spent = {c: s for c, s in stood.seconds.items() if s}
    assert spent == pytest.approx({"detect": 2, "rendezvous": 1, "waiting": 5, "rebuild": 2})


# ---- from the ledger -----------------------------------------------------------------------------------------------


def start(generation: int, step: int) -> dict[str, Any]:
    return {"event": "start", "generation": generation, "time": 0.0, "step": step, "world_size": 1, "mesh": "one rank"}


def spent(
    generation: int, begin: float, end: float, steps: list[int], node: str = "a", **seconds: float
) -> dict[str, Any]:
    seconds["productive"] = seconds.get("productive", 0.0) + end - begin - sum(seconds.values())
    line = {"event": "time", "generation": generation, "node": node, "from": begin, "to": end, "steps": steps}
    return {**line, "seconds": seconds}


def node(generation: int, reached: int, name: str = "a") -> dict[str, Any]:
    return {"event": "node", "generation": generation, "node": name, "time": 0.0, "reached": reached}


def nonzero(account: Goodput) -> dict[str, float]:
    return {cause: seconds for cause, seconds in account.seconds.items() if seconds}


def test_steps_that_a_later_start_does_again_are_replayed() -> None:
    lines = [start(0, 0), spent(0, 0, 100, [0, 10]), spent(0, 100, 200, [10, 20], data=40.0)]
    assert nonzero(goodput(lines)) == {"productive": 160, "data": 40}
    lines += [start(1, 15), node(1, 20), spent(1, 200, 260, [15, 18], restore=30.0)]
    assert nonzero(goodput(lines)) == {"productive": 100 + 30 + 30, "replayed": 30, "data": 40, "restore": 30}
    lines += [start(2, 5), node(2, 18), spent(2, 260, 300, [5, 9])]
    assert nonzero(goodput(lines)) == {"productive": 50 + 40, "replayed": 50 + 60 + 30, "data": 40, "restore": 30}
    assert goodput(lines).percent == pytest.approx(30.0)


def test_holes_are_what_the_agent_says_of_them() -> None:
    """What a killed process had not written: steps, if there were any; of those some were in vain."""
    known = [start(0, 0), spent(0, 0, 10, [0, 4])]
    again = [start(1, 6), spent(1, 30, 40, [6, 9])]
    assert nonzero(goodput([*known, *again, node(1, 8)])) == {"productive": 10 + 10 + 10, "replayed": 10}
    assert nonzero(goodput([*known, *again, node(1, 4)])) == {"productive": 20, "unknown": 20}
    assert nonzero(goodput([*known, *again, node(1, -1)])) == {"productive": 20, "unknown": 20}
    others = [spent(0, 3, 8, [0, 4], node="b"), spent(1, 50, 60, [6, 9], node="c")]  # no holes between agents
    assert goodput([*known, *again, *others, node(1, 8)]).total == 40 + 5 + 10


def test_a_ledger_adds_up_whatever_is_missing_from_it() -> None:
    source = random.Random(1)
    for _ in range(200):
        lines, clock, step = [], 0.0, 0
        for generation in range(source.randint(1, 6)):
            step = source.randint(0, step)
            lines.append(start(generation, step))
            lines.append(node(generation, source.randint(-1, step + 30)))
            for _ in range(source.randint(0, 8)):
                clock += source.choice([0.0, 0.0, source.uniform(-2.0, 9.0)])
                done, length = source.randint(0, 5), source.uniform(0, 10)
                lines.append(
                    spent(generation, clock, clock + length, [step, step + done], data=source.uniform(0, length))
                )
                clock, step = clock + length, step + done
        times = [line for line in lines if line["event"] == "time"]
        span = max((t["to"] for t in times), default=0.0) - min((t["from"] for t in times), default=0.0)
        account = goodput(lines)
        assert account.total == pytest.approx(span, abs=1e-6)
        assert min(account.seconds.values()) > -1e-9
        found = stretches(lines)
        assert all(a.stop == pytest.approx(b.start) for a, b in itertools.pairwise(found))


def test_goodput_of_the_last_while() -> None:
    recent = Recent(window=100.0)
    useful = total = 0.0
    for now in range(0, 1000, 10):
        total += 10
        useful += 10 if now < 500 else 5
        percent = recent.percent(
            now, Goodput({**dict.fromkeys(CAUSES, 0.0), "productive": useful, "data": total - useful})
        )
        assert percent == (None if now == 0 else pytest.approx(100.0 if now < 500 else percent))
    assert percent == pytest.approx(50.0)


def test_a_node_that_dies_before_its_first_account_has_told_what_its_start_took(tmp_path: Path, clock: Clock) -> None:
    book = TimeBook()
    clock.now += 17.0
    book.settle()
    ledger = Ledger(RunDir(tmp_path), generation=0, node="n")
    begun = ledger.opened(book, step=0, reached=-1, name="n", host="h", agent_pid=1, workers=[])
    ledger.flush(wait=60.0)  # and no more
    lines = read_ledger(RunDir(tmp_path))
    assert nonzero(goodput(lines)) == {"startup": pytest.approx(17.0)}
    assert earlier_module.spent_before(lines, begun).total == 0.0, "this start is no earlier one"
    ledger.close()


def test_segments_on_an_object_store(s3_url: str) -> None:
    run_dir = RunDir(s3_url)
    for generation in range(2):
        ledger = Ledger(run_dir, generation=generation, node="n")
        ledger.started(step=5 * generation, world_size=1)
        book = TimeBook()
        ledger.opened(book, step=5 * generation, reached=-1)
        for step in range(5 * generation, 5 * generation + 8, 4):
            book.spend("productive")
            ledger.account(book, step=step, samples=step, tokens=0, now=True)
        ledger.close()
    lines = read_ledger(run_dir)
    assert [line["generation"] for line in lines if line["event"] == "start"] == [0, 1]
    assert len([line for line in lines if line["event"] == "time"]) == 2 * 3
    names = run_dir.names("events")
    assert all(name.endswith(("-start.jsonl", "-n000.jsonl")) for name in names) and len(set(names)) == len(names)
    account = goodput(lines)
    ends = [line[key] for line in lines if line["event"] == "time" for key in ("from", "to")]
    assert account.total == pytest.approx(max(ends) - min(ends), abs=1e-3)


# ---- runs ----------------------------------------------------------------------------------------------------------


class Stalls(Samples):
    """Two samples take half a second each."""

    def __getitem__(self, index: int) -> Any:
        if index in (30, 60):
            time.sleep(0.5)
        return super().__getitem__(index)


class Slow(Recorded):
    def train_dataset(self) -> Any:
        return Stalls()

    def on_validation_start(self) -> None:
        time.sleep(0.3)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        time.sleep(0.4)


@pytest.mark.slow
def test_stalls_of_known_length_have_their_cause(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    began = time.time()
    config = CheckpointConfig(every_steps=2, every_seconds=None)
    Trainer(run_dir=str(tmp_path), max_steps=5, global_batch_size=24, log_every=2, val_every=5, checkpoint=config).fit(
        Slow()
    )
    took = time.time() - began
    lines = read_ledger(RunDir(tmp_path))
    account = goodput(lines)
    times = [line for line in lines if line["event"] == "time"]
    span = max(line["to"] for line in times) - min(line["from"] for line in times)
    assert account.total == pytest.approx(span, abs=1e-3) and span <= took + 1e-3
    spent = account.seconds
    assert spent["data"] >= 0.99, "an epoch has both samples"
    assert spent["validation"] >= 0.59, "at the start and at step 5"
    assert spent["checkpoint"] >= 1.19, "of steps 2, 4 and 5"
    assert spent["unknown"] == spent["replayed"] == spent["compile"] == spent["detect"] == 0.0
    assert spent["productive"] + spent["startup"] <= took - 0.99 - 0.59 - 1.19
    assert logged(tmp_path, "checkpoint/stall_seconds")[4] >= 0.39
    percent, lost = logged(tmp_path, "goodput/percent"), logged(tmp_path, "goodput/lost/data")
    assert sorted(percent) == [2, 4] and 0 < percent[4] < 100 and 0 <= lost[2] <= lost[4] <= spent["data"]

    capsys.readouterr()
    assert _main(["status", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["state"], found["step"], found["samples"], found["generation"]) == ("finished", 5, 100, 0)
    assert found["last_checkpoint"]["step"] == 5 and Path(found["last_checkpoint"]["path"]).is_dir()
    assert found["goodput"]["lost_seconds"]["data"] == pytest.approx(spent["data"])
    assert found["goodput"]["percent"] == pytest.approx(account.percent)
    assert [len(one["workers"]) for one in found["nodes"]] == [1] and found["recoveries"] == []
    assert _main(["status", str(tmp_path)]) == 0
    assert "finished: step 5, generation 0" in capsys.readouterr().out
    assert _main(["status", str(tmp_path / "nothing")]) == 2
    assert "holds no run" in capsys.readouterr().err


def test_a_run_that_says_nothing_is_silent() -> None:
    begins = start(0, 0)
    begins.pop("mesh", None)  # as an older version has written it
    lines = [begins, {**spent(0, 0.0, 50.0, [0, 4]), "samples": 8, "tokens": 0}]
    assert status(lines, now=60.0)["state"] == "running"
    found = status(lines, now=51.0 + SILENT)
    assert (found["state"], found["seen"], found["step"], found["samples"]) == ("silent", 50.0, 4, 8)


def test_a_run_with_rare_log_steps_is_heard_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within steps and a validation, by what it does; and a node of which nothing else is known was there until then."""
    monkeypatch.setattr(courier, "_QUIET", 0.02)  # of two seconds
    found: dict[str, dict[str, Any]] = {}
    accounts: list[tuple[Goodput, Goodput]] = []

    class Rare(Recorded):
        def looks(self, cause: str, step: int) -> None:
            lines = read_ledger(RunDir(tmp_path))
            found[cause] = status(lines)
            if (doing := found[cause]["doing"]) is not None:
                at = doing["cause"], found[cause]["step"]
                accounts.append((goodput(line for line in lines if line["event"] != "alive"), goodput(lines)))
                if at == (cause, step) and time.monotonic() > self.began + 0.4:
                    return
            assert time.monotonic() < self.began + 60, found
            time.sleep(0.02)
            self.looks(cause, step)

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.began = time.monotonic()
            if self.trainer.global_step == 2 and "productive" not in found:
                self.looks("productive", 2)

        def on_validation_start(self) -> None:
            self.began = time.monotonic()
            if self.trainer.global_step:
                self.looks("validation", 3)

    Trainer(run_dir=str(tmp_path), max_steps=3, global_batch_size=24, log_every=1000, val_every=3).fit(Rare())
    for cause, step, words in (("productive", 2, "in step 3, "), ("validation", 3, "validating, ")):
        one = found[cause]
        assert (one["state"], one["step"], one["samples"]) == ("running", step, 24 * step)
        assert (doing_in_words(one, now=one["seen"]) or "").startswith(words)
    written, known = accounts[-1]
    assert known.total > written.total + 0.8
    assert min(known.seconds["productive"], known.seconds["validation"]) > 0.3, "steps until the validation"
    lines = read_ledger(RunDir(tmp_path))
    assert status(lines)["doing"] is None, "it has ended"
    assert goodput(lines).seconds == goodput(line for line in lines if line["event"] != "alive").seconds
    assert not [mark for mark in timeline(lines).marks if mark.kind == "alive"]


@pytest.mark.slow
def test_waiting_for_a_slower_rank_is_straggling(tmp_path: Path) -> None:
    class Uneven(Recorded):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.trainer.global_rank == 1:
                time.sleep(0.5)
            return super().training_step(batch, batch_idx)

    def train(rank: int, world_size: int) -> None:
        Trainer(
            run_dir=str(tmp_path),
            max_steps=4,
            global_batch_size=24,
            micro_batch_size=12,
            log_every=2,
            mesh="dp_replicate=2",
        ).fit(Uneven())

    run_ranks(train, 2)
    account = goodput(read_ledger(RunDir(tmp_path)))
    assert account.seconds["straggling"] >= 0.2, "a part of 2 s, in which rank 0 has something to do as well"
    assert account.seconds["productive"] > 0


@pytest.mark.slow
def test_one_node_of_two_tells_the_end(tmp_path: Path) -> None:
    def train(rank: int, world_size: int) -> list[str]:
        warnings: list[str] = []
        pytest.MonkeyPatch().setattr(ledger_module.log, "warning", lambda text, *args: warnings.append(text % args))
        os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": str(rank)}
        options: dict[str, Any] = {"max_steps": 2, "global_batch_size": 24, "micro_batch_size": 12, "log_every": 1}
        Trainer(run_dir=str(tmp_path), mesh="dp_replicate=2", **options).fit(Recorded())
        return warnings

    assert run_ranks(train, 2) == [[], []]
    lines = read_ledger(RunDir(tmp_path))
    assert [line["outcome"] for line in lines if line["event"] == "end"] == ["finished"]
    assert len([line for line in lines if line["event"] == "node"]) == 2


def test_what_an_exception_broke_off_is_not_productive(tmp_path: Path) -> None:
    class Fails(Recorded):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 1:
                time.sleep(0.3)
                raise ValueError("no")
            return super().training_step(batch, batch_idx)

    with pytest.raises(ValueError, match="no"):
        Trainer(run_dir=str(tmp_path), max_steps=4, global_batch_size=24, log_every=1).fit(Fails())
    lines = read_ledger(RunDir(tmp_path))
    spent = goodput(lines).seconds
    assert spent["unknown"] >= 0.29 and spent["startup"] > 0
    times = [line for line in lines if line["event"] == "time"]
    assert sum(spent.values()) == pytest.approx(times[-1]["to"] - times[0]["from"], abs=1e-3)


@pytest.mark.parametrize("is_readable", [True, False])
def test_what_earlier_starts_spent_is_read_beside_training(
    tmp_path: Path, is_readable: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    options: dict[str, Any] = {"run_dir": str(tmp_path), "global_batch_size": 24, "log_every": 1}
    Trainer(max_steps=2, **options).fit(Recorded())
    earlier = goodput(read_ledger(RunDir(tmp_path)))
    assert sorted(logged(tmp_path, "goodput/percent")) == [1, 2]
    is_read, may_read = threading.Event(), threading.Event()

    def read(run_dir: RunDir) -> Any:
        assert may_read.wait(60)
        if not is_readable:
            is_read.set()
            raise OSError("gone")
        return read_ledger(run_dir)

    class Waits(Callback):
        def on_step_end(self, info: StepInfo) -> None:
            if info.step == 4:
                may_read.set()
                (thread,) = [one for one in threading.enumerate() if one.name == earlier_module.THREAD]
                thread.join(60)

    monkeypatch.setattr(earlier_module, "read_ledger", read)
    with caplog.at_level("WARNING"):
        Trainer(max_steps=6, callbacks=[Waits()], **options).fit(Recorded())
    assert caplog.text.count("the ledger cannot be read (OSError: gone)") == (not is_readable)
    assert sorted(logged(tmp_path, "goodput/percent")) == ([1, 2, 5, 6] if is_readable else [1, 2])
    lost = logged(tmp_path, "goodput/lost/startup")
    if is_readable:
        assert lost[6] >= earlier.seconds["startup"]


def test_a_validation_that_a_loss_has_broken_off_is_in_vain(tmp_path: Path) -> None:
    """The optimizer has stepped for the sixth time, and all goes on from the fifth step."""
    run_dir = RunDir(str(tmp_path))
    ledger, book = Ledger(run_dir, generation=0, node="a"), TimeBook()
    ledger.opened(book, step=0, reached=-1, name="a", host="a", agent_pid=7, workers=[])
    ledger.account(book, step=6, samples=48, tokens=0, now=True)  # as the sixth step is told
    time.sleep(0.01)
    book.spend("validation")
    book.broke_off(is_lost_peer=True)
    time.sleep(0.01)
    session: Any = SimpleNamespace(ledger=ledger, accounts=True, times=book, counters=Counters(step=5), num_stepped=6)
    Session.account_for_now(session)
    ledger.close()
    found = goodput([*read_ledger(run_dir), start(1, 5)]).seconds
    assert found["validation"] == 0.0 and found["replayed"] >= 0.01
    assert found["detect"] >= 0.01, "what comes after a lost peer is until that is seen"


def test_a_recovery_is_written_before_its_process_may_be_lost(tmp_path: Path) -> None:
    """A leader that died a second after its first step took the line of that recovery with it."""
    run_dir = RunDir(str(tmp_path))
    ledger = Ledger(run_dir, generation=1, node="a")
    session: Any = SimpleNamespace(
        ledger=ledger,
        run_dir=run_dir,
        times=TimeBook(),
        counters=Counters(step=7),
        ranks=SimpleNamespace(world_size=2, is_main=True),
        membership=SimpleNamespace(num_nodes=2),
        mesh=SimpleNamespace(shape="dp=2"),
        recovery=Recovery("node-3 was lost", time.time() - 1.0, 9, 3),
        source="the snapshot of step 7 in memory",
        is_first_start=False,
        seconds=[0.0] * 4,
    )
    account = Account(session)
    assert account.first_step(0.5)["elastic/recovery_seconds"] == pytest.approx(1.0, abs=0.9)
    account.tell()
    account.tell()  # nothing more
    deadline = time.monotonic() + 20.0
    while (
        not (there := read_ledger(run_dir)) and time.monotonic() < deadline
    ):  # nobody asks for it, or closes the ledger
        time.sleep(0.01)
    (recovery,) = there
    assert (recovery["event"], recovery["lost_steps"], recovery["nodes_before"]) == ("recovery", 2, 3)
    ledger.close()
