"""Reports of runs whose names and values are not what anybody would expect."""

from __future__ import annotations

import json
from pathlib import Path

import fsspec

from elastictrain.cli.main import _main
from elastictrain.metrics.ledger import read_ledger
from elastictrain.metrics.timeline import timeline_markdown
from elastictrain.reports.facts import read_report
from elastictrain.reports.page import _table, page
from elastictrain.rundir import RunDir
from tests.reports.made import BEGAN, Made, changing
from tests.reports.reading import Document, printed

NODES = ["node-1-11", "node-2-12"]


def test_events_that_nobody_knows_are_text_or_damage(tmp_path: Path) -> None:
    made = Made(tmp_path).run(NODES, until=60)
    about = {"event": "new", "generation": 0, "node": NODES[0]}
    made.events += [
        {**about, "time": "yesterday"},
        {**about, "to": "x"},
        {**about, "time": BEGAN, "step": "<img src=x>"},
    ]
    made.events.append({**about, "event": "<img src=y>", "time": BEGAN, "step": 3, "<img src=z>": "<img src=z>"})
    report = read_report(RunDir(made.write()))
    assert report.num_damaged == {"events": 3}
    text = page(report)
    assert "img" not in {tag for tag, _ in Document(text).found} and "&lt;img src=y&gt;" in text
    assert "<img src=y>" in printed(report) and "img src=y" in timeline_markdown(read_ledger(RunDir(tmp_path)))


def test_a_cell_of_a_table_is_text() -> None:
    assert '<td class="n">&lt;b&gt;</td>' in "".join(_table(["a"], [["<b>"]], text=()))


def test_what_is_no_text_and_what_is_too_large_is_told(tmp_path: Path) -> None:
    made = Made(tmp_path).run(NODES, until=60)
    made.log(**{"train/loss": -1.5e308, "half\ud800": 1.0})
    made.step += 1
    made.log(**{"train/loss": 1.5e308})
    made.write()
    (tmp_path / "run.json").write_text(json.dumps({"target": "a\udc80", "settings": {"b\udc81": "\udc82"}}))
    report = read_report(RunDir(tmp_path))
    assert "half?" in report.series and report.title == "a?"
    assert printed(report) and printed(report, width=90)
    output = tmp_path / "r.html"
    assert _main(["report", str(tmp_path), "--output", str(output)]) == 0
    assert "half?" in output.read_text() and not [*tmp_path.glob(".r.html*")]


def test_no_password_is_shown(tmp_path: Path) -> None:
    changing(tmp_path / "run").write()
    fs = fsspec.filesystem("memory")
    fs.put(f"{tmp_path / 'run'}/", "/me:secret@host/run/", recursive=True)
    report = read_report(RunDir("memory://me:secret@host/run"))
    assert report.url == "memory://host/run" and "secret" not in page(report) + printed(report)
