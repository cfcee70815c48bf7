"""The ledger stays small, and whatever crash comes in between, no second of it is lost or counted twice."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elastictrain.metrics import ledger as ledger_module
from elastictrain.metrics.condensed import condense
from elastictrain.metrics.goodput import goodput
from elastictrain.metrics.ledger import _Segments, condense_earlier, read_ledger
from elastictrain.metrics.lines import stand_in
from elastictrain.metrics.record import Series
from elastictrain.rundir import RunDir
from tests.metrics.test_goodput import node, spent, start

Lines = list[dict[str, Any]]


def history(seed: int, *, generations: int = 5, length: int = 60, nodes: int = 2) -> list[Lines]:
    """Accounts as real nodes write them, by start: without holes but between starts, some steps done in vain."""
    source = random.Random(seed)
    found, step = [], 0
    for generation in range(generations):
        step = source.randint(max(0, step - 30), step)
        lines = [start(generation, step)]
        for name in "abcdefgh"[:nodes]:
            done, now = step, 10_000.0 * generation + source.random()
            who = {"name": name, "host": name, "agent_pid": 1, "workers": []}
            lines.append({**node(generation, step, name), **who})
            lines.append(spent(generation, now, now + 3.0, [done, done], name, startup=3.0))
            for _ in range(length):
                begin, now = (lines[-1]["to"], lines[-1]["to"] + source.uniform(0.5, 9.0))
                more = source.randint(0, 4)
                causes = {"data": source.uniform(0, now - begin)} if source.random() < 0.5 else {}
                lines.append(spent(generation, begin, now, [done, done + more], name, **causes))
                done += more
        step = done
        found.append(lines)
    return found


def same(a: Lines, b: Lines) -> None:
    """Every second has the cause that it had, but for how a line is shared that a later start goes on from the middle of."""
    one, two = goodput(a).seconds, goodput(b).seconds
    done = [seconds.pop("productive") + seconds.pop("replayed") for seconds in (one, two)]
    assert one == pytest.approx(two, abs=1e-6)
    assert done[0] == pytest.approx(done[1], abs=1e-6)


@pytest.mark.parametrize("most", [4, 8, 30])
def test_fewer_lines_have_the_same_totals(most: int) -> None:
    for seed in range(6):
        lines = [line for part in history(seed) for line in part]
        fewer = condense(lines, most=most)
        assert goodput(lines).seconds == pytest.approx(goodput(fewer).seconds, abs=1e-6), "also of what was in vain"
        accounts = [line for line in fewer if line["event"] == "time"]
        assert len(accounts) <= 5 * 2 * (most + 6), "phases, and the line within which a later start began, stay apart"
        assert goodput(lines).seconds == pytest.approx(goodput(condense(fewer, most=most)).seconds, abs=1e-6)


def test_events_of_a_kind_are_bounded() -> None:
    events = [{"event": "checkpoint", "generation": 0, "node": "a", "step": step} for step in range(5000)]
    assert [line["step"] for line in condense(events, most=8)] == list(range(4000, 5000))


def write(run_dir: RunDir, lines: Lines, generation: int, done: Lines, *, at_once: int = 3) -> None:
    """Start number ``generation``, as its nodes write; ``done`` is what has been written, also after a crash."""
    run_dir.create(line_of(lines[0]), "events", f"g{generation:06d}-start.jsonl")
    done.append(lines[0])
    condense_earlier(run_dir, generation)
    for number, name in enumerate("ab"):
        segments = _Segments(run_dir, generation=generation, number=number)
        mine = [line for line in lines[1:] if line["node"] == name]
        for begin in range(0, len(mine), at_once):
            segments.write(mine[begin : begin + at_once])
            done += mine[begin : begin + at_once]


def line_of(line: dict[str, Any]) -> bytes:
    return json.dumps(line).encode() + b"\n"


def test_a_long_run_has_few_objects_and_few_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_module, "_MANY", 8)
    run_dir, done = RunDir(tmp_path), Lines()
    for generation, lines in enumerate(history(1, generations=12, length=120)):
        write(run_dir, lines, generation, done)
        same(read_ledger(run_dir), done)
        assert len([name for name in run_dir.names("events") if not name.endswith("-start.jsonl")]) <= 2 * 2 * 18 + 2, (
            "of two nodes and two starts"
        )
    assert len(read_ledger(run_dir)) < len(done) / 4


def test_steps_in_vain_are_told_exactly_where_rollbacks_are_short(tmp_path: Path) -> None:
    """The newest lines are as they were written: half of those that make a node condense them."""
    run_dir, done = RunDir(tmp_path), Lines()
    for generation, lines in enumerate(history(5, generations=4, length=300)):
        write(run_dir, lines, generation, done, at_once=1)
        assert goodput(read_ledger(run_dir)).seconds == pytest.approx(goodput(done).seconds, abs=1e-6)
    assert len(run_dir.names("events")) < 2 * 2 * (2 * 64 + 2), "of 2400 segments"


class Crash(BaseException):
    pass


class Dying:
    """The storage of a process that dies in its ``at``-th write or removal: before it, in its middle, or behind it."""

    def __init__(self, run_dir: RunDir, at: int) -> None:
        self.run_dir, self.left = run_dir, at

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        create, remove = self.run_dir.create, self.run_dir.fs.rm_file

        def dying_create(data: bytes, *parts: str) -> None:
            self.left -= 1
            if self.left == 0:
                create(data[: len(data) * 2 // 3], *parts)
                raise Crash
            create(data, *parts)

        def dying_remove(path: str) -> None:
            self.left -= 1
            if self.left == 0:
                raise Crash
            remove(path)

        monkeypatch.setattr(self.run_dir, "create", dying_create)
        monkeypatch.setattr(self.run_dir.fs, "rm_file", dying_remove)


@pytest.mark.slow
def test_a_crash_at_any_moment_keeps_the_totals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was whole before the crash counts once, whatever was being replaced; and so it stays when the run goes on."""
    monkeypatch.setattr(ledger_module, "_MANY", 4)
    parts = history(2, generations=4, length=20)
    moments = 0
    while True:
        moments += 1
        run_dir, done = RunDir(tmp_path / str(moments)), Lines()
        dying = Dying(run_dir, moments)
        with monkeypatch.context() as patch:
            dying.install(patch)
            try:
                for generation in range(3):
                    write(run_dir, parts[generation], generation, done)
            except Crash:
                pass
        if dying.left > 0:
            break
        there = read_ledger(run_dir)
        whole = [line for line in there if line in done or line["event"] == "time"]
        lost = goodput(done).total - goodput(whole).total
        assert lost <= 1e-6, f"{lost} s are gone after a crash at moment {moments}"
        cut = [line for line in parts_of(parts, done) if line in there]  # whole lines of a segment that was cut
        same(there, done + cut)
        write(run_dir, parts[3], 3, done)
        same(read_ledger(run_dir), done + cut)
    assert moments > 100


def parts_of(parts: list[Lines], done: Lines) -> Lines:
    return [line for part in parts for line in part if line not in done]


def test_a_store_that_deletes_nothing_keeps_the_totals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_module, "_MANY", 4)
    monkeypatch.setattr(ledger_module, "_TOO_MANY", 16)
    run_dir, done = RunDir(tmp_path), Lines()

    def refuse(path: str) -> None:
        raise PermissionError(path)

    with monkeypatch.context() as patch:
        patch.setattr(run_dir.fs, "rm_file", refuse)
        for generation, lines in enumerate(history(3, generations=3, length=40)):
            write(run_dir, lines, generation, done)
            same(read_ledger(run_dir), done)
    for generation, lines in enumerate(history(4, generations=6, length=40)[3:], start=3):
        write(run_dir, lines, generation, done)
        same(read_ledger(run_dir), done)


def interrupted(
    monkeypatch: pytest.MonkeyPatch, run_dir: RunDir, generation: int, meanwhile: Callable[[], None]
) -> bool:
    """Condense earlier starts; between reading them and writing what stands for them something else happens, if it is."""
    happened = False

    def create(series: Series, data: bytes) -> str:
        nonlocal happened
        if not happened:
            happened = True
            meanwhile()
        return written(series, data)

    written = Series.create
    with monkeypatch.context() as patch:
        patch.setattr(Series, "create", create)
        condense_earlier(run_dir, generation)
    return happened


@pytest.mark.parametrize("seed", range(6))
def test_two_that_condense_at_once_count_nothing_twice_and_lose_nothing(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader of an earlier start is late, and a node that is cut off goes on writing and condensing its own."""
    monkeypatch.setattr(ledger_module, "_MANY", 6)
    source = random.Random(seed)
    run_dir, done = RunDir(tmp_path), Lines()
    parts = history(seed, generations=5, length=30, nodes=1)
    zombie, num_interrupted = _Segments(run_dir, generation=0, number=0), 0

    def write_some(lines: Lines, segments: _Segments) -> None:
        while lines and source.random() < 0.8:
            some = [lines.pop(0) for _ in range(min(len(lines), source.randint(1, 4)))]
            segments.write(some)
            done.extend(some)

    late = parts[0][1:]
    event = {"event": "checkpoint", "generation": 0, "node": "a", "time": 1.0, "step": 1, "path": "p", "seconds": 1.0}
    late.insert(8, {**event, "num_bytes": 1})
    for generation in range(1, 5):
        lines = parts[generation]
        run_dir.create(line_of(lines[0]), "events", f"g{generation:06d}-start.jsonl")
        done.append(lines[0])
        write_some(late, zombie)
        mine = _Segments(run_dir, generation=generation, number=0)
        for index in range(1, len(lines), 2):
            mine.write(lines[index : index + 2])
            done += lines[index : index + 2]

        def meanwhile(generation: int = generation) -> None:
            write_some(late, zombie)
            condense_earlier(run_dir, generation + 1)
            write_some(late, zombie)

        num_interrupted += interrupted(monkeypatch, run_dir, generation + 1, meanwhile)
        there = read_ledger(run_dir)
        assert goodput(there).total == pytest.approx(goodput(done).total, abs=1e-6)
        same(there, done)
        saves = [[line for line in lines if line["event"] == "checkpoint"] for lines in (there, done)]
        assert saves[0] == saves[1]
    while late:
        write_some(late, zombie)
    assert num_interrupted
    condense_earlier(run_dir, 9)
    same(read_ledger(run_dir), done)


def test_what_is_still_being_written_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader may see half of an object, or of one that stands for others: neither is replaced or deleted then."""
    monkeypatch.setattr(ledger_module, "_MANY", 4)
    run_dir = RunDir(tmp_path)
    lines = history(0, generations=1, length=9, nodes=1)[0]
    for number, line in enumerate(lines[1:]):
        run_dir.create(line_of(line), "events", f"g000000-{number:06d}-n000.jsonl")
    whole = {name: run_dir.read("events", name) for name in ("g000000-000003-n000.jsonl",)}
    whole["g000000-000020-n000.jsonl"] = stand_in(lines[1:4], names=["g000000-000000-n000.jsonl"], generation=0)
    for name, data in whole.items():
        (tmp_path / "events" / name).write_bytes(data[: len(data) // 2])
    condense_earlier(run_dir, 1)
    for name, data in whole.items():
        (tmp_path / "events" / name).write_bytes(data)
    assert goodput(read_ledger(run_dir)).seconds == pytest.approx(goodput(lines[1:]).seconds)


def test_signs_of_life_of_many_nodes_all_count() -> None:
    signs = [
        {"event": "alive", "node": f"n{i % 16}", "generation": i // 208, "time": 1.0 + i, "step": i, "doing": "data"}
        for i in range(1040)
    ]
    assert sorted(condense(signs, most=100), key=lambda line: float(line["time"])) == signs
