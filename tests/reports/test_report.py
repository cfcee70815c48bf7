"""``elastictrain report``: of finished, running and crashed runs, of damaged ones, and of what is no run."""

from __future__ import annotations

import json
import os
import random
import re
import resource
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from elastictrain.cli.main import _main
from elastictrain.metrics.goodput import CAUSES
from elastictrain.metrics.picture import gantt_image
from elastictrain.metrics.timeline import COLORS
from elastictrain.reports.facts import _MEANING, Report, facts, read_report, waterfall
from elastictrain.reports.page import page
from elastictrain.rundir import RunDir
from tests.helpers import elastictrain_command
from tests.reports.made import BEGAN, Made, changing
from tests.reports.reading import Document, printed

NODES = ["node-1-11", "node-2-12"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return changing(tmp_path_factory.mktemp("run")).write()


@pytest.fixture(scope="module")
def report(run: Path) -> Report:
    return read_report(RunDir(run), now=BEGAN + 1000)


def test_where_the_time_went_adds_up(report: Report) -> None:
    rows = waterfall(report.account)
    total = 0.0
    for cause, seconds, before in rows:
        assert before == pytest.approx(total) and seconds > 0 and cause in CAUSES
        total += seconds
    assert total == pytest.approx(report.account.total)
    there = sum(row.stretches[-1].stop - row.stretches[0].start for row in report.timeline.rows)
    assert total == pytest.approx(there - 68.0, abs=1.0), "one of four nodes was away for 68 s"


def test_the_page_tells_everything_and_needs_nothing(report: Report) -> None:
    text = page(report)
    document = Document(text)
    assert not [attrs for _, attrs in document.found if "src" in attrs or "href" in attrs]
    assert "http:" not in text and "https:" not in text and "url(" not in text and "@import" not in text
    ((_, policy),) = [(tag, attrs) for tag, attrs in document.found if "http-equiv" in attrs]
    assert (policy["content"] or "").startswith("default-src 'none'")
    (data,) = [text for text in document.texts if text.startswith("[{")]
    charts = json.loads(data)
    assert [[one["name"] for one in chart["series"]] for chart in charts] == [
        ["train/loss", "val/loss"],
        ["throughput/samples_per_second"],
    ]
    assert len(charts) == len(document.of_class("chart"))
    loss = charts[0]["series"][0]
    assert loss["step"] == list(range(10, 401, 10)) and len(loss["x"]) == len(loss["mean"]) == 40
    curves = [attrs["points"] or "" for attrs in document.of_class("curve")]
    assert [len(points.split()) for points in curves] == [40, 8, 40]
    assert len(document.of_class("m-recovery")) == 1 and len(document.of_class("m-checkpoint")) == 8
    for cause in ("productive", "replayed", "detect", "rendezvous", "rebuild", "restore", "data", "startup"):
        assert len(document.of_class(f"c-{cause}")) >= 2, "in the table, and of a node"
    words = " ".join(document.texts)
    for told in (
        "finished",
        "77.9%",
        "node-3 was killed by SIGKILL at step 137",
        "node-10",
        "1m16s",
        "4 → 3 nodes, 6 ranks",
        "step-00000400",
    ):
        assert told in words, told
    assert all(attrs.get("aria-label") for attrs in document.of_class("chart") + document.of_class("gantt"))


def test_every_cause_has_its_own_colour_in_every_picture(tmp_path: Path) -> None:
    made = Made(tmp_path).run(["node-1-11"], until=20).spend("node-1-11", dict.fromkeys(CAUSES, 20.0)).end()
    assert list(COLORS) == list(CAUSES) and len(set(COLORS.values())) == len(CAUSES)
    report = read_report(RunDir(made.write()), now=BEGAN + 1000)
    text, drawn, image = page(report), printed(report, width=120, has_colors=True), gantt_image(made.events)
    document = Document(text)
    for cause, color in COLORS.items():
        rgb = [int(color[i : i + 2], 16) for i in (1, 3, 5)]
        assert f".c-{cause}{{fill:{color}}}.k-{cause}{{background:{color}}}" in text, cause
        assert len(document.of_class(f"c-{cause}")) == 2 and len(document.of_class(f"k-{cause}")) == 2, cause
        assert drawn.count("\x1b[38;2;{};{};{}m".format(*rgb)) >= 2, f"{cause}: in the table and in the key"
        assert (image == rgb).all(axis=2).sum() > 14 * 14 + 30, f"{cause}: in the key, and in the row of the node"
    for state in _MEANING:
        assert f".state.{state}" in text, "and so has every state of a run"


def test_the_terminal_tells_the_same(report: Report) -> None:
    plain = printed(report).splitlines()
    assert plain[0] == "net.py:Net"
    for line in (
        "  goodput: 77.9% of 15m02s on all nodes",
        "  starts: 3, of them 1 after a failure",
        "  event: after 1m16s: recovery, generation 1 at step 137: node-3 was killed by SIGKILL at step 137: 4 → 3 nodes,"
        " mesh dp_replicate=6, paused 8.5 s, 37 steps lost",
    ):
        assert line in plain
    assert sum(line.startswith("  spent: ") for line in plain) == len(waterfall(report.account))
    assert sum(line.startswith("  node: node-") for line in plain) == 4
    assert sum(line.startswith("  checkpoint: step ") for line in plain) == 8
    for width in (60, 80, 200):
        drawn = printed(report, width=width)
        assert max(map(len, drawn.splitlines())) <= width
        assert "nodes over time" in drawn and "node-10 █" in drawn and "·" in drawn and "step 400" in drawn
        dots = [line for line in drawn.splitlines() if re.search("[\u2801-\u28ff]", line)]
        assert len(dots) >= 3 * 3, "three curves of some rows"


@pytest.mark.parametrize(
    ("outcome", "age", "told"),
    [
        (None, 5.0, "running; last seen 5.0s ago"),
        (None, 7200.0, "silent: killed, getting ready for long, or without its run directory"),
        ("change", 5.0, "changing: nodes join or leave"),
        ("change", 7200.0, "silent: killed, getting ready"),
        ("finished", 7200.0, "finished; last seen 2h00m ago"),
        ("interrupt", 60.0, "interrupted, with everything saved"),
        ("preempt", 60.0, "preempted, with everything saved"),
    ],
)
def test_runs_in_every_state(tmp_path: Path, outcome: str | None, age: float, told: str) -> None:
    made = Made(tmp_path).run(NODES, until=100)
    if outcome is not None:
        made.end(outcome)
    report = read_report(RunDir(made.write()), now=made.now + age)
    assert told in dict(facts(report))["state"]
    assert told.split(";")[0].split(":")[0] in " ".join(Document(page(report)).texts)
    assert told in printed(report)


def test_what_was_planned_is_no_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = Made(tmp_path).run(NODES, until=100).run(NODES[:3], until=150, resumed=100, cause="node-10 left")
    made.events[-1 - next(i for i, line in enumerate(reversed(made.events)) if line["event"] == "recovery")][
        "planned"
    ] = True
    made.run(NODES[:2], until=200, resumed=150, cause="node-3 was lost").end()
    report = read_report(RunDir(made.write()))
    assert dict(facts(report))["starts"] == "3, of them 1 after a failure, 1 after a planned change"
    assert [one["planned"] for one in report.status["recoveries"]] == [True, False]
    assert [mark.kind for mark in report.timeline.marks if mark.kind in ("change", "recovery")] == [
        "change",
        "recovery",
    ]
    text = page(report)
    assert "node-10 left (planned)" in text and "node-3 was lost (planned)" not in text
    assert _main(["status", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "  planned change: node-10 left; 0 steps" in out and "  recovery: node-3 was lost; " in out


def test_what_a_task_logs_has_charts(tmp_path: Path) -> None:
    """Losses share one; other values have one each, validation first; the rest is in the table."""
    made = Made(tmp_path).run(NODES, until=50)
    for name in ("train/accuracy", "aaa", "bbb", "val/bpb", "goodput/percent"):
        for _ in range(3):
            made.step += 1
            made.log(**{name: float(made.step)})
    report = read_report(RunDir(made.write()))
    (data,) = [text for text in Document(page(report)).texts if text.startswith("[{")]
    names = [[one["name"] for one in chart["series"]] for chart in json.loads(data)]
    assert names == [["train/loss", "val/loss"], ["val/bpb"], ["aaa"], ["bbb"], ["throughput/samples_per_second"]]
    assert list(report.others) == ["goodput/percent", "lr/sgd", "train/accuracy"]


def test_a_run_that_has_only_just_begun(tmp_path: Path) -> None:
    """One that was killed before its first step, too."""
    start = {"event": "start", "generation": 0, "time": BEGAN, "step": 0, "world_size": 1}
    (tmp_path / "events").mkdir()
    (tmp_path / "events" / "g000000-start.jsonl").write_text(json.dumps(start) + "\n")
    report = read_report(RunDir(tmp_path), now=BEGAN + 1)
    assert "Nothing finite was logged yet" in page(report) and "No node has told of itself yet" in page(report)
    assert "  state: running; last seen 1.0s ago" in printed(report)
    assert printed(report, width=80)


def test_what_a_run_says_is_text(tmp_path: Path) -> None:
    """Names and causes come from users and from other processes; a page must not run them."""
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
    made = Made(tmp_path).run(NODES, until=60)
    made.log(**{f"loss{evil}": 1.0, f"val/{evil}": 2.0})
    made.run(NODES, until=100, resumed=50, cause=f"{evil}[bold]\x1b[31m")
    made.events = [{**line, "name": evil} if line["event"] == "node" else line for line in made.events]
    made.write()
    (tmp_path / "run.json").write_text(json.dumps({"target": evil, "settings": {evil: evil}, "versions": {evil: 1}}))
    report = read_report(RunDir(tmp_path))
    text = page(report)
    document = Document(text)
    assert [tag for tag, _ in document.found].count("script") == 2 and "img" not in {tag for tag, _ in document.found}
    assert any("onerror" in text for text in document.texts)
    assert "[bold]" in printed(report) and "[bold]" in printed(report, width=100)


def test_damage_is_passed_over_and_counted(tmp_path: Path, run: Path) -> None:
    place = shutil.copytree(run, tmp_path / "run")
    (place / "metrics" / "g000002-000099.jsonl").write_text('{"step": 4, "generation": 2}\n{"step": 5, "gen')
    (place / "events" / "g000002-000099-n000.jsonl").write_text('{"event": "time", "generation": 2}\n\0\0\0\n{"eve')
    (place / "run.json").write_text("{")
    report = read_report(RunDir(place))
    told = "4 damaged lines were passed over (events 3, metrics 1)"
    assert told in page(report) and told in printed(report) and told in printed(report, width=100)
    assert report.title == "run" and report.status["step"] == 400


@pytest.mark.slow
def test_no_damage_is_a_traceback(tmp_path: Path, run: Path) -> None:
    """Bytes lost and bytes changed, and every field of the ledger with another kind of value."""
    source = random.Random(0)
    values: list[Any] = [None, "x", -1, 1e300, [], {}, True, "2\n3", "\ud800"]
    for number in range(40):
        place = shutil.copytree(run, tmp_path / str(number))
        for file in [*place.glob("events/*"), *place.glob("metrics/*"), place / "run.json"]:
            data = bytearray(file.read_bytes())
            if "start" in file.name and number % 4:
                continue
            kind = source.randrange(3)
            if kind == 0:
                data = data[: source.randrange(len(data))]
            elif kind == 1:
                for _ in range(5):
                    data[source.randrange(len(data))] = source.randrange(256)
            elif file.suffix == ".jsonl":
                lines = [json.loads(line) for line in data.decode().splitlines()]
                for line in source.sample(lines, min(3, len(lines))):
                    if "event" in line and source.randrange(2):
                        line["event"] = "another"
                    line[source.choice(list(line))] = source.choice(values)
                data = bytearray("".join(json.dumps(line) + "\n" for line in lines).encode())
            file.write_bytes(data)
        code = _main(["report", str(place), "--output", str(tmp_path / "r.html")])
        assert code == 0 or (code == 2 and number % 4 == 0), "only starts that are gone may leave nothing to tell"
        if code == 0:
            Document((tmp_path / "r.html").read_text())
            assert _main(["report", str(place)]) == 0
            assert printed(read_report(RunDir(place)), width=90)
            assert _main(["status", str(place)]) == 0


def test_what_is_no_run_gets_one_line(tmp_path: Path, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    begun = tmp_path / "begun"
    begun.mkdir()
    (begun / "run.json").write_text("{}")
    file = tmp_path / "file"
    file.write_text("")
    for what, told in (
        ([str(tmp_path / "nothing")], "holds no run: give the directory that"),
        ([str(file)], "file cannot be read (NotADirectoryError"),
        ([str(begun)], "has not begun to train: look again when its first step is done"),
        (["nope://x/y"], "nope"),
        (
            [str(run), "--output", str(tmp_path / "no" / "r.html")],
            "r.html cannot be written (No such file or directory)",
        ),
        ([str(run), "--output", str(tmp_path)], "is a directory"),
    ):
        for command in ["report", "status"][: 1 if "--output" in what else 2]:
            assert _main([command, *what]) == 2
            err = capsys.readouterr().err
            assert told in err and err.startswith("elastictrain: error: ") and err.count("\n") == 1, err


def test_the_file_is_written_whole(tmp_path: Path, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "r.html"
    output.write_text("old")
    assert _main(["report", str(run), "--output", str(output)]) == 0
    assert capsys.readouterr().out == f"{output}\n"
    assert output.read_text().endswith("</html>\n") and [file.name for file in tmp_path.iterdir()] == ["r.html"]


def test_checkpoints_that_were_deleted_and_such_that_only_storage_knows(tmp_path: Path, run: Path) -> None:
    place = shutil.copytree(run, tmp_path / "run")
    shutil.rmtree(place / "checkpoints" / "step-00000050")
    (place / "checkpoints" / "step-00000400" / "000000-abc" / "COMMIT").unlink()  # an attempt that nobody finished
    other = place / "checkpoints" / "step-00000060" / "000007-f"
    other.mkdir(parents=True)
    (other / "COMMIT").write_text("{}")
    found = {one.step: (one.is_there, one.seconds) for one in read_report(RunDir(place)).checkpoints}
    assert found[50] == (False, 1.5) and found[60] == (True, None) and found[100] == (True, 1.5)
    assert found[400] == (False, 1.5) and list(found) == sorted(found)


@pytest.mark.slow
def test_a_run_on_an_object_store(s3_url: str, run: Path, tmp_path: Path) -> None:
    place = RunDir(s3_url)
    for file in filter(Path.is_file, run.rglob("*")):
        place.create(file.read_bytes(), *file.relative_to(run).parts)
    output = tmp_path / "r.html"
    assert _main(["report", s3_url, "--output", str(output)]) == 0
    there, here = read_report(place, now=BEGAN), read_report(RunDir(run), now=BEGAN)
    assert there.status == here.status and facts(there)[:5] == facts(here)[:5]
    assert [one.is_there for one in there.checkpoints] == [True] * 8
    assert output.read_text().count("<polyline") == page(here).count("<polyline")
    assert _main(["report", s3_url + "-not"]) == 2


@pytest.mark.slow
def test_many_nodes_and_many_starts_stay_small(tmp_path: Path) -> None:
    made = Made(tmp_path, account_every=50)
    for _ in range(12):
        made.run([f"host-{n}-1" for n in range(150)], until=made.step + 50)
    report = read_report(RunDir(made.write()))
    text = page(report)
    assert len(text) < 3_000_000 and "55 more" in text
    assert len(Document(text).of_class("start")) == 11 + 11 + 12
    assert "127 more" in printed(report, width=100)


@pytest.mark.slow
def test_a_hundred_thousand_steps_in_a_moment(tmp_path: Path) -> None:
    """The whole command; time is that of the processor, which others on the machine do not change."""
    made = Made(tmp_path / "run", log_every=1, account_every=60, num_more=5, checkpoint_every=350)
    made.path.mkdir()
    nodes = [f"node-{n}-7" for n in range(4)]
    while made.step < 100_000:
        back = None if made.generation < 0 else made.step - made.step % 350
        made.run(nodes, until=min(100_000, made.step + 1017), resumed=back, cause="worker rank 3 was killed by SIGKILL")
    made.end().write()
    events = [line for line in made.events if line["event"] not in ("time", "node")]
    assert len(made.records) > 100_000 and len(events) >= 480
    output = tmp_path / "r.html"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    elastictrain_command("report", tmp_path / "run", "--output", output)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    size = os.path.getsize(output)
    began = time.process_time()
    for record in made.records:
        json.loads(record)
    least = time.process_time() - began  # what nobody can do without
    print(f"{len(made.records)} records, {len(events)} events: {spent:.1f} s of a processor, {size / 1e6:.1f} MB")
    assert 0 < spent < max(5.0, 6 * least) and size < 5_000_000, "5 s, or more where the processor is a slow one"
    text = output.read_text()
    document = Document(text)
    (data,) = [text for text in document.texts if text.startswith("[{")]
    loss = json.loads(data)[0]["series"][0]
    assert sum(loss["n"]) == 100_000 and len(loss["n"]) == 600, "every step once, whatever was done again"
    lowest = re.search(r"lowest ([\d.]+) at step", text)
    assert lowest is not None and min(loss["low"]) == pytest.approx(float(lowest[1]), rel=1e-4)
