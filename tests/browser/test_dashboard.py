"""What a person sees of a run with a join, a leave, a kill and saves: every chart of the dashboard, in a real browser."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from elastictrain.cli.main import _main
from elastictrain.metrics.layout import CHARTS, MARGINS
from elastictrain.metrics.ledger import read_ledger
from elastictrain.rundir import RunDir
from tests.browser.chromium import Page, chromium
from tests.browser.watched_run import STEPS, VAL_EVERY, Watched
from tests.cli.test_dashboard import dashboard
from tests.helpers import free_port

# Of each chart: its title, steps and values of each series, and how many marks and lines are drawn in a run's colour.
CHARTS_OF_PAGE = """
const isColoured = text => {
  const [r, g, b] = (text.match(/[0-9.]+/g) || [0, 0, 0]).map(Number);
  return Math.max(r, g, b) - Math.min(r, g, b) > 40;
};
return all.filter(one => /^tf-custom-scalar-(multi-line|margin)-chart-card$/.test(one.localName)).map(card => {
  const inside = within(card.shadowRoot || card);
  const chart = inside.find(one => one.localName === 'vz-line-chart2')._chart;
  const drawn = [...chart.targetSVG.node().querySelectorAll('path')].filter(path => {
    const style = getComputedStyle(path);
    return (path.getAttribute('d') || '').length > 4 && (isColoured(style.stroke) || isColoured(style.fill));
  });
  const series = {};
  for (const name of chart.seriesNames) {
    series[name] = chart.name2datasets[name].data().map(point => [point.step, point.scalar]);
  }
  return {title: card.title, drawn: drawn.length, series: series};
});
"""
TEXTS = """
return all.filter(one => !/^(style|script|noscript)$/.test(one.localName)).flatMap(
  one => [...one.childNodes].filter(node => node.nodeType === 3).map(node => node.data.trim())).filter(text => text);
"""
PICTURES = "return all.filter(one => one.localName === 'img' && one.naturalWidth).map(one => one.naturalWidth);"


@pytest.mark.slow
@pytest.mark.timeout(700)  # four starts of three nodes, and a page of twenty charts, take a loaded machine a while
def test_a_run_with_a_join_a_leave_a_kill_and_saves(tmp_path: Path) -> None:
    with chromium(tmp_path) as page:
        Watched(tmp_path).run()
        lines = check_run(tmp_path / "run")
        with dashboard(tmp_path, str(tmp_path / "run"), "--port", str(free_port())) as (_, address):
            check_charts(page, address, lines)
            check_panels(page, address.split("#")[0])
        check_report(page, tmp_path)


def check_run(run_dir: Path) -> list[dict[str, Any]]:
    """It is what it should be to be looked at; rank 0 was on each of the three nodes."""
    lines = read_ledger(RunDir(run_dir))
    changes = [line for line in lines if line["event"] == "recovery"]
    assert [line["cause"].split()[0] for line in changes][-2:] == ["left", "lost"] and "joined" in changes[0]["cause"]
    assert changes[-1]["lost_steps"] > 0 and any(line["event"] == "checkpoint" for line in lines)
    writers = [one["name"] for one in lines if one["event"] == "node" and one["workers"][0]["rank"] == 0]
    assert len(set(writers)) == 3, "of each start, where rank 0 was"
    return lines


def check_charts(page: Page, address: str, lines: list[dict[str, Any]]) -> None:
    page.open(address)
    titles = [title for charts in (CHARTS, MARGINS) for category in charts.values() for title in category]
    found = page.wait_for(
        CHARTS_OF_PAGE,
        lambda charts: len(charts) == len(titles) and all(chart["series"] and chart["drawn"] for chart in charts),
    )
    assert sorted(chart["title"] for chart in found) == sorted(titles)
    points = {chart["title"]: chart["series"] for chart in found}
    steps = {
        title: {name: [step for step, _ in one] for name, one in series.items()} for title, series in points.items()
    }
    for title, series in steps.items():
        for name, one in series.items():
            assert one == sorted(set(one)), f"{title}: {name} goes back and forth"
    every = list(range(1, STEPS + 1))
    assert steps["loss"] == {"train/loss (run)": every, "val/loss (run)": list(range(0, STEPS + 1, VAL_EVERY))}
    assert [len(points) for points in steps["training"].values()] == [STEPS]
    assert [len(points) for points in steps["learning rate"].values()] == [STEPS]
    starts = sorted((line["generation"], line["world_size"]) for line in lines if line["event"] == "start")
    assert [ranks for _, ranks in starts][-3:] == [3, 2, 1]
    wanted = {"ranks": ("world_size", [n for _, n in starts]), "generation": ("generation", [g for g, _ in starts])}
    for title, (name, values) in wanted.items():
        assert points[title].keys() == {f"elastic/{name} (run)"}
        assert [value for value, _ in groupby(value for _, value in points[title][f"elastic/{name} (run)"])] == values
    costs = {name: len(one) for name, one in steps["seconds of a recovery"].items()}
    failures = sum(line["event"] == "recovery" and not line["planned"] for line in lines)
    assert failures and sum(costs.values()) == len(starts) - 1
    assert costs == {
        "elastic/change_seconds (run)": len(starts) - 1 - failures,
        "elastic/recovery_seconds (run)": failures,
    }
    assert steps["size (GiB)"].keys() == {"checkpoint/gib (run)"}
    assert {"goodput/lost/replayed (run)", "goodput/lost/startup (run)"} <= steps["node-seconds lost, by cause"].keys()
    by_part = steps["seconds of a step, by part"]
    assert len(by_part["time/data (run)"]) >= 2
    busy = steps["busy seconds of a step, by rank"]
    assert busy.keys() == {f"rank/busy (run/rank-{rank:05d})" for rank in (0, 1, 2)}
    assert min(map(len, busy.values())) >= 1, "at least once in each generation"
    assert page.errors() == []
    page.screenshot("dashboard")


def check_panels(page: Page, address: str) -> None:
    page.open(f"{address}#text")
    texts = page.wait_for(TEXTS, lambda texts: "finished" in texts)
    for what in ("joined", "left", "lost"):
        assert any(text.startswith(f"{what} ") and "paused" in text for text in texts), what
    assert {"start", "checkpoint", "change", "recovery", "end"} <= set(texts)
    page.open(f"{address}#images")
    assert page.wait_for(PICTURES, lambda widths: len(widths) == 1) == [640]
    page.screenshot("nodes", width=760, height=480)
    page.open(f"{address}#hparams")
    page.wait_for(TEXTS, lambda texts: {"lr", "global_batch_size", "gate"} <= set(texts))
    page.open(f"{address}#timeseries")
    page.wait_for(TEXTS, lambda texts: {"throughput", "goodput", "elastic", "checkpoint"} <= set(texts))
    assert page.errors() == []


def check_report(page: Page, folder: Path) -> None:
    assert _main(["report", str(folder / "run"), "--output", str(folder / "report.html")]) == 0
    page.open(f"file://{folder}/report.html")
    texts = page.wait_for(TEXTS, lambda texts: any(text.startswith("lost ") for text in texts))
    assert any("train/loss" in text for text in texts)
    drawn = page.ask("return all.filter(one => one.localName === 'svg').map(one => one.getBoundingClientRect().width);")
    assert drawn and all(width > 0 for width in drawn)
    assert page.errors() == []
    page.screenshot("report")
