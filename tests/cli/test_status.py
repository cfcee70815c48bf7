"""``elastictrain status`` of a run whose worker was killed: what it cost is told, and every second has a cause."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest

from elastictrain.cli.main import _main
from elastictrain.metrics.goodput import goodput, stretches
from elastictrain.metrics.ledger import read_ledger
from elastictrain.reports.facts import read_report, waterfall
from elastictrain.rundir import RunDir
from tests import forked
from tests.cli.test_run import NET, Command, logged


@pytest.mark.slow
def test_a_killed_worker_and_what_it_cost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--run-dir", "r", "--max-steps", "25", "--checkpoint-every", "10", "--log-every", "1"]
    options += ["--set", "pace=0.1", "--set", "die_at=17", "--nproc-per-node", "2", "--micro-batch-size", "4"]
    before = time.time()
    run = Command(tmp_path, NET, *options, before=forked.install)
    assert run.wait() == 0, run.text
    took = time.time() - before

    assert _main(["status", str(tmp_path / "r"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["state"], found["step"], found["samples"], found["world_size"]) == ("finished", 25, 200, 2)
    (recovery,) = found["recoveries"]
    assert re.search(r"worker rank 1 \(pid \d+\) was killed by SIGKILL at step 1[67]", recovery["cause"])
    assert recovery["generation"] == found["generation"] == 1
    assert 16 <= recovery["from_step"] <= 17 and recovery["resumed_step"] in (0, 10)
    assert recovery["lost_steps"] == recovery["from_step"] - recovery["resumed_step"]
    assert ("/checkpoints/step-00000010/" in recovery["source"]) == (recovery["resumed_step"] == 10), recovery["source"]
    phases = recovery["seconds"]
    assert min(phases.values()) >= 0 and min(phases["detect"], phases["rebuild"], phases["first_step"]) > 0
    assert sum(phases.values()) - phases["total"] <= phases["total"] + 1e-3

    lines = read_ledger(RunDir(tmp_path / "r"))
    account = goodput(lines)
    found_stretches = stretches(lines)
    span = found_stretches[-1].stop - found_stretches[0].start
    assert account.total == pytest.approx(span, abs=0.05), "one node: from its first second to its last one"
    seen = [row["time"] for row in logged(tmp_path / "r")]
    assert max(seen) - min(seen) <= account.total <= took
    lost = found["goodput"]["lost_seconds"]
    assert lost == {cause: pytest.approx(seconds) for cause, seconds in account.lost.items()}
    assert lost["replayed"] >= 0.1 * (recovery["lost_steps"] - 1), "each of these steps takes a tenth of a second"
    assert account.seconds["productive"] >= 0.1 * 24, "and so does each that counts"
    assert {"startup", "detect", "rebuild", "checkpoint"} <= lost.keys()
    assert [len(node["workers"]) for node in found["nodes"]] == [2]
    report = read_report(RunDir(tmp_path / "r"))
    assert waterfall(report.account)[0][0] == "productive" and len(report.timeline.rows) == 1
    assert [one["lost_steps"] for one in report.status["recoveries"]] == [recovery["lost_steps"]]
    assert report.losses["train/loss"].steps.tolist() == list(range(1, 26)), "each step once"
    assert [(one.step, one.is_there) for one in report.checkpoints if one.step == 25] == [(25, True)]
    logged_recovery = [
        row["elastic/recovery_seconds"] for row in logged(tmp_path / "r") if "elastic/recovery_seconds" in row
    ]
    assert logged_recovery == [pytest.approx(phases["total"], abs=0.5)]
