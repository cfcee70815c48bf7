"""Nodes × time by cause, what happened when, and the image of both."""

from __future__ import annotations

import itertools
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from elastictrain.metrics.goodput import CAUSES, TimeBook, goodput
from elastictrain.metrics.ledger import Ledger, is_sound, read_ledger
from elastictrain.metrics.picture import encode_png, gantt_image, gantt_png, ticks
from elastictrain.metrics.timeline import COLORS, columns, timeline, timeline_markdown
from elastictrain.rundir import RunDir
from tests.reports.made import changing

Lines = list[dict[str, Any]]


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> Lines:
    return read_ledger(RunDir(changing(tmp_path_factory.mktemp("run")).write()))


def test_made_lines_are_what_the_ledger_writes(tmp_path: Path, lines: Lines) -> None:
    ledger = Ledger(RunDir(tmp_path), generation=0, node="n-1")
    ledger.started(step=0, world_size=1, mesh="one rank")
    book = TimeBook()
    about = {"name": "n", "host": "h", "agent_pid": 1, "workers": [{"rank": 0, "pid": 2}]}
    ledger.opened(book, step=0, reached=-1, **about)
    book.spend("productive")
    ledger.account(book, step=1, samples=8, tokens=0, now=True)
    ledger.ended(step=1, outcome="finished")
    ledger.close()
    written = read_ledger(RunDir(tmp_path))
    assert len(written) == 5 and all(map(is_sound, written))
    for event in ("start", "node", "time", "end"):
        real = {frozenset(line) for line in written if line["event"] == event}
        made = {frozenset(line) for line in lines if line["event"] == event}
        assert made <= {keys | {"samples", "tokens"} for keys in real} | real, event


def test_a_row_for_each_node(lines: Lines) -> None:
    run = timeline(lines)
    assert [row.label for row in run.rows] == ["node-1", "node-2", "node-3", "node-10"]
    assert {stretch.node for stretch in run.rows[2].stretches} == {"node-3-13", "node-3-99"}, "both of its agents"
    two = [{**line, "name": "host"} if line["event"] == "node" else line for line in lines]
    assert [row.label for row in timeline(two).rows] == ["host (1)", "host (2)", "host (3)", "host (4)"]


@pytest.mark.parametrize("num", [1, 7, 100, 5000])
def test_columns_hold_every_second(lines: Lines, num: int) -> None:
    run, account = timeline(lines), goodput(lines)
    found = columns(run.rows, begin=run.begin, end=run.end, num=num)
    assert dict(zip(CAUSES, found.sum(axis=0), strict=True)) == pytest.approx(account.seconds, abs=1e-6)
    assert found.sum(axis=1).max() <= (run.end - run.begin) / num * 4 + 1e-6, "four nodes have no more than that"
    separate = sum(columns([row], begin=run.begin, end=run.end, num=num) for row in run.rows)
    np.testing.assert_allclose(separate, found, atol=1e-6)


def test_phases_come_in_their_order(lines: Lines) -> None:
    run = timeline(lines)
    found = columns(run.rows[:1], begin=run.begin, end=run.end, num=2000)
    main = [list(CAUSES)[number] for number in found.argmax(axis=1)]
    order = [cause for cause, _ in itertools.groupby(main)]
    recovered = ["replayed", "detect", "rendezvous", "rebuild", "restore"]
    assert order == ["startup", "productive", *recovered, "productive", "startup", "productive"]
    gone = columns(run.rows[2:3], begin=run.begin, end=run.end, num=2000).sum(axis=1)
    assert (gone == 0).sum() == pytest.approx(2000 * 68 / (run.end - run.begin), rel=0.2), "nobody was there for 68 s"


def test_what_happened_when(lines: Lines) -> None:
    marks = timeline(lines).marks
    assert [mark.time for mark in marks] == sorted(mark.time for mark in marks)
    starts = [mark.text for mark in marks if mark.kind == "start"]
    assert starts == [
        "8 ranks (dp_replicate=8)",
        "6 ranks (dp_replicate=6), node-3 left",
        "8 ranks (dp_replicate=8), node-3 joined",
    ]
    (recovery,) = [mark for mark in marks if mark.kind == "recovery"]
    assert recovery.text == (
        "node-3 was killed by SIGKILL at step 137: 4 → 3 nodes, mesh dp_replicate=6, paused 8.5 s, 37 steps lost"
    )
    begun = next(mark for mark in marks if mark.kind == "start" and mark.generation == 1)
    assert recovery.step == 137 and recovery.time == pytest.approx(begun.time - 8.0), "the failure, not its end"
    assert [mark.step for mark in marks if mark.kind == "checkpoint"] == [50, 100, 150, 200, 250, 300, 350, 400]


def test_an_event_that_nobody_knows_is_told_as_it_is(lines: Lines) -> None:
    left = {"event": "left", "generation": 1, "time": lines[0]["time"] + 1.0, "notice": True, "text": "node-3 left"}
    (mark,) = [mark for mark in timeline([*lines, left]).marks if mark.kind == "left"]
    assert mark.text == "notice True, node-3 left" and mark.step is None
    (recovery,) = [line for line in lines if line["event"] == "recovery"]
    planned = {**recovery, "event": "left", "cause": "node-3 left with notice", "lost_steps": 0}
    (mark,) = [mark for mark in timeline([planned]).marks if mark.kind == "left"]
    assert mark.text == "node-3 left with notice: 4 → 3 nodes, mesh dp_replicate=6, paused 8.5 s, 0 steps lost"
    assert mark.step == 137 and mark.time == recovery["time"] - 8.5, "as much as a recovery says"


def test_the_table_of_events(lines: Lines) -> None:
    text = timeline_markdown(lines)
    rows = [row for row in text.splitlines() if row.startswith("|")]
    assert len(rows) == 2 + len(timeline(lines).marks)
    assert any(
        row.startswith("| 1m16s | recovery | 1 | 137 | node-3 was killed by SIGKILL at step 137: 4 → 3 nodes")
        for row in rows
    )
    few = timeline_markdown(lines, limit=3)
    assert few.count("\n|") == 1 + 3 and "earlier events are left out" in few and "finished" in few
    evil = {"event": "recovery", "generation": 1, "time": 9.0, "cause": "a|b\n| <b>*c*</b>", "from_step": 1}
    evil |= {"lost_steps": 1, "resumed_step": 0, "seconds": {"total": 1.0}}
    (row,) = [row for row in timeline_markdown([evil]).splitlines() if "recovery" in row]
    assert r"a\|b \| \<b\>\*c\*\</b\>: paused 1.0 s, 1 step lost |" in row


def test_the_image_has_the_colours_of_what_was(lines: Lines) -> None:
    image = gantt_image(lines)
    run = timeline(lines)
    assert image.shape[1:] == (640, 3) and image.dtype == np.uint8 and 150 < image.shape[0] < 640
    for cause in CAUSES:
        color = [int(COLORS[cause][i : i + 2], 16) for i in (1, 3, 5)]
        there = (image == color).all(axis=2)
        if goodput(lines).seconds[cause] == 0:
            assert not there.any() or cause == "checkpoint", cause  # whose colour the marks have
        else:
            assert there.sum() > 7 * 14, cause
    blue = (image == [int(COLORS["productive"][i : i + 2], 16) for i in (1, 3, 5)]).all(axis=2)
    share = goodput(lines).seconds["productive"] / (4 * (run.end - run.begin))
    assert blue.sum() == pytest.approx(share * 4 * 30 * 520, rel=0.05), "the area of a cause is its time"


def test_the_image_stays_one_that_can_be_shown(tmp_path: Path) -> None:
    made = changing(tmp_path)
    many = [made.run([f"host-{n}-7" for n in range(200)], until=made.step + 10) for _ in range(2)][-1]
    image = gantt_image(many.events)
    assert image.shape[0] < 1200, "24 rows and the legend"
    assert gantt_image([]).shape[1] == 640, "nothing is known yet"
    start = {"event": "start", "generation": 0, "time": 5.0, "step": 0, "world_size": 1}
    assert gantt_image([start]).shape[1] == 640


def test_png_is_what_the_standard_says(lines: Lines) -> None:
    data = gantt_png(lines)
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    at, chunks = 8, {}
    while at < len(data):
        size, kind = int.from_bytes(data[at : at + 4], "big"), data[at + 4 : at + 8]
        chunks[kind] = data[at + 8 : at + 8 + size]
        assert zlib.crc32(kind + chunks[kind]) == int.from_bytes(data[at + 8 + size : at + 12 + size], "big")
        at += 12 + size
    image = gantt_image(lines)
    raw = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(image.shape[0], -1)
    assert list(chunks) == [b"IHDR", b"IDAT", b"IEND"] and not raw[:, 0].any()
    np.testing.assert_array_equal(raw[:, 1:].reshape(image.shape), image)
    assert encode_png(np.zeros((1, 1, 3), np.uint8)).endswith(b"IEND\xaeB`\x82")


@pytest.mark.parametrize("length", [0.0, 0.3, 7.0, 59.0, 61.0, 5000.0, 86400.0 * 3, 86400.0 * 400, 1e12])
def test_ticks_are_round_and_few(length: float) -> None:
    found = ticks(length, num=5)
    assert found[0] == 0 and len(found) <= 6 and found[-1] <= length + 1e-9
