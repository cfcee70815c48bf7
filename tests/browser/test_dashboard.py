"""What a person sees of a real run, of which a worker was killed: every chart of the dashboard, in a real browser."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastictrain.cli.main import _main
from elastictrain.metrics.layout import CHARTS, MARGINS
from tests.browser.chromium import Page, chromium
from tests.cli.test_dashboard import dashboard
from tests.cli.test_run import Command
from tests.helpers import free_port

TASK = str(Path(__file__).with_name("watched_task.py"))
STEPS, SAVE_EVERY, VAL_EVERY = 26, 6, 6
OPTIONS = f"""--run-dir run --nproc-per-node 2 --micro-batch-size 4 --log-every 1 --max-steps {STEPS}
    --checkpoint-every {SAVE_EVERY} --val-every {VAL_EVERY} --set die_at=15
    --set wait_at=20 --set until=run/checkpoints/step-00000018/*/COMMIT
    --callback throughput-monitor:peak_tflops=1 --callback learning-rate-monitor --callback gradient-clipping:norm=1"""

# Of each chart: its title, the steps of each series, and how many marks and lines are drawn in a run's colour.
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
  for (const name of chart.seriesNames) series[name] = chart.name2datasets[name].data().map(point => point.step);
  return {title: card.title, drawn: drawn.length, series: series};
});
"""
TEXTS = """
return all.filter(one => !/^(style|script|noscript)$/.test(one.localName)).flatMap(
  one => [...one.childNodes].filter(node => node.nodeType === 3).map(node => node.data.trim())).filter(text => text);
"""
PICTURES = "return all.filter(one => one.localName === 'img' && one.naturalWidth).map(one => one.naturalWidth);"


@pytest.mark.slow
@pytest.mark.timeout(400)  # a page of twenty charts takes a loaded machine a while to draw
def test_a_run_with_a_kill_a_restart_and_saves(tmp_path: Path) -> None:
    with chromium(tmp_path) as page:
        run = Command(tmp_path, TASK, *OPTIONS.split())
        assert run.wait() == 0, run.text
        assert "was killed by SIGKILL at step 15" in run.text
        with dashboard(tmp_path, str(tmp_path / "run"), "--port", str(free_port())) as (_, address):
            check_charts(page, address)
            check_panels(page, address.split("#")[0])
        check_report(page, tmp_path)


def check_charts(page: Page, address: str) -> None:
    page.open(address)
    titles = [title for charts in (CHARTS, MARGINS) for category in charts.values() for title in category]
    found = page.wait_for(
        CHARTS_OF_PAGE,
        lambda charts: len(charts) == len(titles) and all(chart["series"] and chart["drawn"] for chart in charts),
    )
    assert sorted(chart["title"] for chart in found) == sorted(titles)
    steps = {chart["title"]: chart["series"] for chart in found}
    for title, series in steps.items():
        for name, points in series.items():
            assert points == sorted(set(points)), f"{title}: {name} goes back and forth"
    every = list(range(1, STEPS + 1))
    assert steps["loss"] == {"train/loss (run)": every, "val/loss (run)": [*range(0, STEPS, VAL_EVERY), STEPS]}
    assert [len(points) for points in steps["training"].values()] == [STEPS]
    assert [len(points) for points in steps["learning rate"].values()] == [STEPS]
    for title, name in (("ranks", "world_size"), ("generation", "generation")):  # ten times a second at most
        (points,) = steps[title].values()
        assert steps[title].keys() == {f"elastic/{name} (run)"} and len(points) >= 2
    assert [len(points) for points in steps["seconds of a recovery"].values()] == [1]
    assert steps["size (GiB)"].keys() == {"checkpoint/gib (run)"}
    assert {"goodput/lost/replayed (run)", "goodput/lost/startup (run)"} <= steps["node-seconds lost, by cause"].keys()
    by_part = steps["seconds of a step, by part"]
    assert len(by_part["time/data (run)"]) >= 2
    busy = steps["busy seconds of a step, by rank"]
    assert busy.keys() == {f"rank/busy (run/rank-{rank:05d})" for rank in (0, 1)}
    assert min(map(len, busy.values())) >= 2, "at least once in each generation"
    assert page.errors() == []
    page.screenshot("dashboard")


def check_panels(page: Page, address: str) -> None:
    page.open(f"{address}#text")
    texts = page.wait_for(TEXTS, lambda texts: "finished" in texts)
    assert any("was killed by SIGKILL at step 15" in text for text in texts)
    assert {"start", "checkpoint", "recovery", "end"} <= set(texts)
    page.open(f"{address}#images")
    assert page.wait_for(PICTURES, lambda widths: len(widths) == 1) == [640]
    page.screenshot("nodes", width=760, height=480)
    page.open(f"{address}#hparams")
    page.wait_for(TEXTS, lambda texts: {"lr", "global_batch_size", "die_at"} <= set(texts))
    page.open(f"{address}#timeseries")
    page.wait_for(TEXTS, lambda texts: {"throughput", "goodput", "elastic", "checkpoint"} <= set(texts))
    assert page.errors() == []


def check_report(page: Page, folder: Path) -> None:
    assert _main(["report", str(folder / "run"), "--output", str(folder / "report.html")]) == 0
    page.open(f"file://{folder}/report.html")
    texts = page.wait_for(TEXTS, lambda texts: any("killed by SIGKILL" in text for text in texts))
    assert any("train/loss" in text for text in texts)
    drawn = page.ask("return all.filter(one => one.localName === 'svg').map(one => one.getBoundingClientRect().width);")
    assert drawn and all(width > 0 for width in drawn)
    assert page.errors() == []
    page.screenshot("report")
