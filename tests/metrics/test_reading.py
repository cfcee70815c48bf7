"""A start that reads a large state says what it reads and how far it is, on its terminal and in ``elastictrain status``."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from elastictrain import Trainer, restoring
from elastictrain.checkpoint.ranges import Ranges
from elastictrain.cli.main import _main
from elastictrain.metrics.ledger import read_ledger
from elastictrain.metrics.reading import Signs, in_words
from elastictrain.metrics.status import SILENT, doing_in_words, status
from elastictrain.rundir import RunDir
from tests.trainer.tasks import Recorded

pytestmark = pytest.mark.filterwarnings("ignore")


def test_it_says_what_it_reads_and_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir, seen = RunDir(tmp_path / "run"), list[dict[str, Any]]()
    train = {"run_dir": run_dir.url, "global_batch_size": 24, "log_every": 1}
    Trainer(max_steps=2, **train).fit(Recorded())  # type: ignore[arg-type]
    assert "reading" not in capsys.readouterr().out, "nothing was read"
    read = Ranges._read_into

    def slowly(self: Ranges, ranges: Sequence[tuple[str, int, int]], views: Sequence[memoryview]) -> None:
        until_told(lambda sign: sign["done"] < sign["wanted"])
        read(self, ranges, views)
        until_told(lambda sign: sign["done"] == sign["wanted"])

    def until_told(is_so: Any) -> None:
        deadline = time.monotonic() + 60
        while (found := status(read_ledger(run_dir)))["reading"] is None or not is_so(found["reading"]):
            assert time.monotonic() < deadline, found
            time.sleep(0.01)
        seen.append(found)

    monkeypatch.setattr(Ranges, "_read_into", slowly)
    monkeypatch.setattr(restoring, "FIRST", 0.0)
    monkeypatch.setattr(restoring, "LONGEST", 0.02)
    monkeypatch.setattr(restoring, "EVERY", 0.02)
    Trainer(max_steps=3, **train).fit(Recorded())  # type: ignore[arg-type]
    out = capsys.readouterr().out
    (folder,) = (tmp_path / "run" / "checkpoints" / "step-00000002").iterdir()
    assert f"elastictrain: reading checkpoint {folder} (step 2, " in out
    for what in ("model", "optimizer's state"):
        told = [one for one in seen if one["reading"]["what"] == what]
        assert {one["state"] for one in told} == {"starting"} and told[0]["reading"]["step"] == 2
        assert (doing_in_words(told[0], now=0.0) or "").startswith(f"reading checkpoint {folder}, ")
        assert f"elastictrain: {in_words(told[-1]['reading'])}" in out and f"B of the {what} read" in out
    assert out.count("reading checkpoint") == 1 and not list((tmp_path / "run" / "events").glob("*reading*"))
    after = status(read_ledger(run_dir))
    assert (after["state"], after["reading"], after["generation"]) == ("finished", None, 1)


def test_what_a_start_that_was_killed_as_it_read_has_left_is_told_for_a_while(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = RunDir(tmp_path)
    Trainer(run_dir=run_dir.url, max_steps=1, global_batch_size=24).fit(Recorded())
    sign = {"source": "checkpoint x", "step": 1, "num_bytes": 4 * 10**10, "what": "model"}
    signs = Signs(run_dir, generation=lambda: 1)
    signs.put(**sign, wanted=13 * 10**9, done=10**9)
    signs.put(**sign, wanted=13 * 10**9, done=2 * 10**9)
    assert len(list((tmp_path / "events").glob("*reading*"))) == 1
    capsys.readouterr()
    assert _main(["status", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "starting: step 1," in shown
    assert "  now: reading checkpoint x, 40.0GB; step 1: 2.00GB of 13.0GB of the model read\n" in shown
    assert _main(["status", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["reading"] == {**sign, "wanted": 13 * 10**9, "done": 2 * 10**9}
    assert _main(["report", str(tmp_path)]) == 0
    later = status(read_ledger(run_dir), now=time.time() + SILENT)
    assert (later["state"], later["reading"]) == ("finished", None)
