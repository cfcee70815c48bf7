"""What was logged comes back as arrays, and long series become short without hiding anything."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from elastictrain.metrics.lines import Folder, parse
from elastictrain.metrics.record import Recorder
from elastictrain.metrics.series import Series, read_series, thin
from elastictrain.rundir import RunDir
from tests.records import read_records


def write(folder: Path, generation: int, number: int, rows: list[dict[str, Any]], end: str = "\n") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    text = "\n".join(json.dumps({"generation": generation, **row}) for row in rows) + end
    (folder / f"g{generation:06d}-{number:06d}.jsonl").write_text(text)


def test_values_come_back_as_they_were_logged(tmp_path: Path) -> None:
    recorder = Recorder(RunDir(tmp_path), generation=0, start_step=0, tensorboard=False)
    values = [1.5, math.nan, -math.inf, 2.0**60, 7]
    for step, value in enumerate(values, 1):
        recorder.log(step, 8 * step, {"a": value, "step": 3.0}, epoch=0)
        if step % 2 == 0:
            recorder.log(step, 8 * step, {"val/b": 0.5}, epoch=0)
    recorder.close()
    found, num_damaged = read_series(RunDir(tmp_path))
    assert list(found) == ["a", "value/step", "val/b"] and num_damaged == 0
    np.testing.assert_array_equal(found["a"].values, values)
    np.testing.assert_array_equal(found["a"].steps, [1, 2, 3, 4, 5])
    np.testing.assert_array_equal(found["val/b"].steps, [2, 4])
    assert found["a"].num_not_finite == 2 and len(found["a"].finite.values) == 3


def test_of_steps_done_again_the_later_ones_stay(tmp_path: Path) -> None:
    """Line by line it is the same, whatever is logged and however often a run goes back."""
    source = random.Random(0)
    for number in range(30):
        folder = tmp_path / str(number)
        step = 0
        for generation in range(source.randint(1, 5)):
            step = source.randint(0, step)
            rows = []
            for _ in range(source.randint(1, 20)):
                step += source.randint(1, 3)
                rows.append({"step": step, "a": source.random()} | ({"b": source.random()} if step % 2 else {}))
            write(folder / "metrics", generation, 0, rows)
        kept = read_records(RunDir(folder))
        found, _ = read_series(RunDir(folder))
        for name in ("a", "b"):
            expected = {line["step"]: line[name] for line in kept if name in line}
            got = found.get(name, Series(np.array([]), np.array([])))
            assert dict(zip(got.steps.tolist(), got.values.tolist(), strict=True)) == expected


def test_a_validation_of_the_step_that_was_gone_on_from_stays(tmp_path: Path) -> None:
    write(tmp_path / "metrics", 0, 0, [{"step": 10, "a": 1.0}, {"step": 10, "v": 5.0}, {"step": 20, "a": 2.0}])
    write(tmp_path / "metrics", 1, 0, [{"step": 10, "v": 6.0}, {"step": 20, "a": 3.0}])
    found, _ = read_series(RunDir(tmp_path))
    assert found["a"].values.tolist() == [1.0, 3.0] and found["v"].values.tolist() == [6.0]


def test_what_is_lost_and_not_yet_done_again_is_not_there(tmp_path: Path) -> None:
    """A start that goes on from 50 and logs at 100 first has lost 60 to 90, as TensorBoard has it too."""
    run_dir = RunDir(tmp_path)
    for generation, steps in enumerate((range(10, 100, 10), (100, 200))):
        recorder = Recorder(run_dir, generation=generation, start_step=50 * generation)
        for step in steps:
            recorder.log(step, step, {"a": float(generation)}, epoch=0)
        recorder.close()
    found, _ = read_series(run_dir, starts={0: 0, 1: 50})
    assert found["a"].steps.tolist() == [10, 20, 30, 40, 50, 100, 200]
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("a")] == found["a"].steps.tolist()
    found, _ = read_series(run_dir, starts={0: 0, 1: 50, 2: 0})
    assert found["a"].steps.tolist() == []


DAMAGED = [
    '{"step": 3, "gener',
    "\0\0\0\0",
    "[1, 2]",
    "17",
    "{}",
    "[" * 100_000,
    '{"step": "x", "generation": 0, "a": 1}',
    '{"step": 3, "generation": 0, "a": [1]}',
    '{"step": 3, "generation": 0, "a": "one"}',
    '{"step": -1, "generation": 0, "a": 1}',
    '{"step": NaN, "generation": 0, "a": 1}',
    '{"step": 3, "a": 1}',
    '{"step": 3, "generation": 0, "a": 1' + "0" * 400 + "}",
    '{"step": 3, "generation": 0, "a": 1} {"step": 4}',
]


@pytest.mark.parametrize("number", range(len(DAMAGED)))
def test_damaged_lines_are_passed_over_and_counted(tmp_path: Path, number: int) -> None:
    write(tmp_path / "metrics", 0, 0, [{"step": 1, "a": 1.0}], end=f"\n{DAMAGED[number]}\n")
    write(tmp_path / "metrics", 0, 1, [{"step": 5, "a": 2.0}], end="")  # whole, though it does not end a line
    found, num_damaged = read_series(RunDir(tmp_path))
    assert num_damaged == 1
    assert (found["a"].steps.tolist(), found["a"].values.tolist()) == ([1, 5], [1.0, 2.0])


def test_what_was_read_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "metrics"
    write(folder, 0, 0, [{"step": 1}])
    (folder / "g000000-000001.jsonl").write_text('{"step": 2}\n{"st')  # is being written
    run_dir = RunDir(tmp_path)
    asked: list[str] = []
    read_all = run_dir.read_all
    monkeypatch.setattr(run_dir, "read_all", lambda where, names: asked.extend(names) or read_all(where, names))
    lines = Folder(run_dir, "metrics")
    assert [line["step"] for line in lines.read()] == [1, 2] and lines.num_damaged == 1
    asked.clear()
    (folder / "g000000-000001.jsonl").write_text('{"step": 2}\n{"step": 3}\n')
    write(folder, 0, 2, [{"step": 4}])
    assert [line["step"] for line in lines.read()] == [1, 2, 3, 4] and lines.num_damaged == 0
    assert asked == ["g000000-000001.jsonl", "g000000-000002.jsonl"]
    asked.clear()
    assert len(lines.read()) == 4 and asked == []
    assert parse(b"") == ([], 0)


# ---- thinning ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 5, 99, 100, 101, 1000, 12_345])
def test_a_thinned_series_hides_nothing(size: int) -> None:
    source = np.random.default_rng(size)
    steps = np.cumsum(source.integers(1, 20, size)).astype(float)
    values = source.normal(size=size)
    values[source.random(size) < 0.05] = np.nan
    found = thin(Series(steps, values), num=100)
    good = np.isfinite(values)
    steps, values = steps[good], values[good]
    assert len(found.steps) <= 100 and found.counts.sum() == len(values)
    if not len(values):
        return
    assert found.low.min() == values.min() and found.high.max() == values.max()
    assert float((found.mean * found.counts).sum() / found.counts.sum()) == pytest.approx(values.mean(), abs=1e-9)
    assert (found.low <= found.mean).all() and (found.mean <= found.high).all()
    ends = np.cumsum(found.counts)
    for begin, end, low, mean, high, where in zip(
        ends - found.counts, ends, found.low, found.mean, found.high, found.steps, strict=True
    ):
        part = values[begin:end]
        assert (low, high) == (part.min(), part.max()) and mean == pytest.approx(part.mean())
        assert where == pytest.approx(steps[begin:end].mean())
    assert (np.diff(found.steps) > 0).all()


def test_one_large_value_among_many_is_seen() -> None:
    values = np.ones(100_000)
    values[54_321] = 1e300
    found = thin(Series(np.arange(1.0, 100_001), values), num=600)
    assert found.high.max() == 1e300 and np.isfinite(found.mean).all() and (found.high == 1).sum() == 599
