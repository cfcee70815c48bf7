"""How often "auto" saves: against a brute-force optimum, and against the run's own past."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest

from elastictrain.checkpoint.interval import ASSUMED, LARGEST, UNKNOWN, Interval, optimum
from elastictrain.config import CheckpointConfig
from elastictrain.errors import UsageError
from elastictrain.metrics.ledger import Ledger, num_cut_short
from elastictrain.rundir import RunDir


def _expected(interval: float, cost: float, mean: float) -> float:
    """Seconds per second of work, for failures at exponential times and a restart that costs nothing (Daly, eq. 20)."""
    return mean * (math.exp((interval + cost) / mean) - 1) / interval


@pytest.mark.parametrize(("cost", "mean"), [(0.05, 21600.0), (4.0, 3600.0), (60.0, 3600.0), (300.0, 1800.0)])
def test_no_other_interval_is_better(cost: float, mean: float) -> None:
    best = min((cost * 1.02**i for i in range(1500) if cost * 1.02**i < mean), key=lambda t: _expected(t, cost, mean))
    assert _expected(optimum(cost, mean), cost, mean) == pytest.approx(_expected(best, cost, mean), rel=2e-3)
    assert optimum(cost, mean) == pytest.approx(best, rel=0.1)


def test_a_save_that_takes_longer_than_machines_live() -> None:
    assert optimum(100.0, 50.0) == 50.0


def test_what_a_run_has_seen() -> None:
    fresh = Interval()
    assert (fresh.seconds, fresh.cost, fresh.between_failures) == (UNKNOWN, None, ASSUMED)
    fresh.stalled, fresh.written = 0.2, 3.0
    assert fresh.cost == pytest.approx(0.5)
    assert fresh.seconds == pytest.approx(optimum(0.5, ASSUMED))
    assert str(fresh).endswith("one costs training 0.5 s, and a failure comes every 6 h (assumed)")
    tried = Interval(num_failures=4, trained=3600.0, stalled=0.2, written=3.0)
    assert tried.between_failures == (ASSUMED + 3600.0) / 5
    assert tried.seconds < fresh.seconds
    assert "(4 in 60 min of training)" in str(tried)
    assert Interval(given=600.0, stalled=0.2, written=3.0).seconds == pytest.approx(optimum(0.5, 600.0))


def test_bounds() -> None:
    assert Interval(given=60.0, stalled=0.01, written=100.0).seconds == 200.0, "no save before the last one is written"
    assert Interval(given=1e9, stalled=100.0).seconds == LARGEST


@pytest.mark.parametrize("url", ["{tmp}/run", "memory://ledger-{name}"])
def test_starts_that_were_cut_short(url: str, tmp_path: Path) -> None:
    run_dir = RunDir(url.format(tmp=tmp_path, name=tmp_path.name))
    assert num_cut_short(run_dir.names("events")) == 0
    for generation, outcome in enumerate([None, "preempt", None, "finished"]):
        ledger = Ledger(run_dir, generation=generation)
        ledger.started(step=generation * 10, world_size=2)
        if outcome is not None:
            ledger.ended(step=generation * 10 + 5, outcome=outcome)
    assert num_cut_short(run_dir.names("events")) == 2
    line = run_dir.read_json("events", "g000001-end.jsonl")
    assert (line["event"], line["generation"], line["step"], line["outcome"]) == ("end", 1, 15, "preempt")


def test_a_ledger_that_cannot_be_written_stops_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "events").write_text("a file where the folder should be")
    Ledger(RunDir(tmp_path), generation=0).started(step=0, world_size=1)
    assert "could not be written" in caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every_seconds": "often"}, "checkpoint every_seconds='often' must be a number, \"auto\" or None"),
        ({"every_seconds": 0.0}, "checkpoint every_seconds=0.0 must be above 0, or None"),
        (
            {"every_seconds": "auto", "seconds_between_failures": -1.0},
            "checkpoint seconds_between_failures=-1.0 must be above 0, or None",
        ),
        ({"seconds_between_failures": 60.0}, 'with every_seconds=300.0 does nothing: use every_seconds="auto"'),
    ],
)
def test_what_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        CheckpointConfig(**options)
