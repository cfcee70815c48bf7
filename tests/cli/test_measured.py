"""Real runs with a killed worker, on one node and on two: what the ledger says is what one measures from outside, what a
person reads, and what Prometheus is told meanwhile."""

from __future__ import annotations

import csv
import itertools
import json
import re
import threading
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from elastictrain.metrics.goodput import goodput, stretches
from elastictrain.metrics.ledger import read_ledger
from elastictrain.metrics.prometheus import PREFIX, metric_name
from elastictrain.rundir import RunDir
from tests.cli.measured_task import notes
from tests.cli.test_run import ROOT, Command
from tests.helpers import free_port
from tests.metrics.test_prometheus import samples
from tests.processes import began_at

pytestmark = pytest.mark.slow

TASK = str(Path(__file__).with_name("measured_task.py"))


@dataclass
class Ran:
    """A run that has ended."""

    folder: Path
    began: list[float]  # by node: when the kernel started its agent's process
    ended: list[float]  # when its parent saw that end
    text: list[str]
    scrapes: list[dict[tuple[str, str], float]] = field(default_factory=list)

    @property
    def lines(self) -> list[dict[str, Any]]:
        return read_ledger(RunDir(self.folder / "run"))


def train(folder: Path, nodes: int, *, port: int | None = None) -> Ran:
    """25 steps, of which the 17th kills rank 1 in the first generation."""
    ran = Ran(folder, [], [0.0] * nodes, [""] * nodes)
    options = [f"{TASK}:Measured", "--run-dir", str(folder / "run"), "--max-steps", "25", "--checkpoint-every", "5"]
    options += ["--set", f"folder={folder}", "--set", "pace=0.1", "--set", "die_at=16", "--log-every", "1"]
    options += ["--micro-batch-size", "4", "--callback", "throughput-monitor:peak_tflops=1,every=0", "--logger", "csv"]
    if nodes == 1:
        options += ["--nproc-per-node", "2", "--metrics-port", "0", "--metrics-host", "127.0.0.1"]
    else:
        options += ["--nproc-per-node", "1", "--nnodes", str(nodes), "--rdzv-endpoint", f"127.0.0.1:{port}"]
    commands = []
    for number in range(nodes):
        (folder / str(number)).mkdir()
        local = ["--local-addr", "127.0.0.1"] if nodes > 1 else []
        commands.append(Command(folder / str(number), *options, *local))
        ran.began.append(began_at(commands[-1].pid))
    is_over = threading.Event()
    watcher = threading.Thread(target=watch, args=(commands[0], ran, is_over)) if nodes == 1 else None
    if watcher is not None:
        watcher.start()
    codes = [-1] * nodes

    def wait(number: int) -> None:
        codes[number], ran.ended[number] = commands[number].wait(), time.time()
        ran.text[number] = commands[number].text

    waiters = [threading.Thread(target=wait, args=(number,)) for number in range(nodes)]
    for waiter in waiters:
        waiter.start()
    for waiter in waiters:
        waiter.join()
    assert codes == [0] * nodes, ran.text
    is_over.set()
    if watcher is not None:
        watcher.join()
    return ran


def watch(command: Command, ran: Ran, is_over: threading.Event) -> None:
    """What is scraped, again and again, from when the address is told until the command ends."""
    while (told := re.search(r"metrics are at (http://127.0.0.1:\d+/metrics)\n", command.text)) is None:
        if is_over.wait(0.05):
            return
    while not is_over.wait(0.1):
        try:
            with urllib.request.urlopen(told[1], timeout=30) as answer:
                ran.scrapes.append(samples(answer.read().decode()))
        except OSError:
            time.sleep(0.5)
            if not is_over.is_set() and Path(f"/proc/{command.pid}").exists():
                ran.scrapes.append({})


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return train(tmp_path_factory.mktemp("alone"), 1)


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return train(tmp_path_factory.mktemp("together"), 2, port=free_port())


@pytest.fixture(params=["alone", "together"])
def ran(request: pytest.FixtureRequest) -> Ran:
    return request.getfixturevalue(request.param)  # type: ignore[no-any-return]


def test_causes_add_up_to_the_time_of_all_nodes(ran: Ran) -> None:
    """Each from when the kernel started its agent until its parent saw that end."""
    found = stretches(ran.lines)
    by_node = {node: [one for one in found if one.node == node] for node in dict.fromkeys(one.node for one in found)}
    assert len(by_node) == len(ran.began)
    for number, mine in enumerate(sorted(by_node.values(), key=lambda mine: mine[0].start)):
        assert all(a.stop == b.start for a, b in itertools.pairwise(mine)), "without holes"
        assert mine[0].start == pytest.approx(ran.began[number], abs=0.05)
        agent = int(mine[0].node.rpartition("-")[2])
        seen = [note["time"] for note in notes(ran.folder) if note["agent"] == agent]
        assert seen[-1] <= mine[-1].stop <= max(ran.ended)
    account = goodput(ran.lines)
    outside = sum(ran.ended) - sum(ran.began)
    assert account.total == pytest.approx(outside, abs=max(0.01 * outside, 0.3)), "and what it takes to end a process"
    assert sum(account.seconds.values()) == pytest.approx(account.total)
    assert min(account.seconds.values()) >= 0.0


def test_a_recovery_takes_as_long_as_one_measures(ran: Ran) -> None:
    """From the last sign of life of the worker that dies to the end of the first step after it."""
    (recovery,) = (line for line in ran.lines if line["event"] == "recovery")
    seen = notes(ran.folder)
    died = max(note["time"] for note in seen if (note["rank"], note["generation"]) == (1, 0))
    again = min(note["time"] for note in seen if (note["rank"], note["generation"], note["what"]) == (0, 1, "step"))
    died += 0.1  # it sleeps for so long before it kills itself
    assert recovery["seconds"]["total"] == pytest.approx(again - died, rel=0.1, abs=0.15)
    assert recovery["nodes"] == recovery["nodes_before"] == len(ran.began) and recovery["ranks"] == 2
    phases = [recovery["seconds"][name] for name in ("detect", "rendezvous", "rebuild", "restore", "first_step")]
    assert sum(phases) == pytest.approx(recovery["seconds"]["total"], rel=0.1, abs=0.15)


def test_one_line_for_a_recovery(ran: Ran) -> None:
    """Among nodes it says no more than that workers have failed: each node tells of its own."""
    (line,) = [line for text in ran.text for line in text.splitlines() if " paused " in line]
    cause = r"worker rank 1 .* was killed by SIGKILL at step 1[567]" if len(ran.began) == 1 else ".*failed.*"
    cost = (
        r"2 ranks, mesh dp_\w+=2, paused \d+\.\d s, \d+ steps? lost, on from (/.*|the snapshot of step \d+ in memory)"
    )
    assert re.fullmatch(rf"elastictrain: {cause}: {cost}", line), line


def test_a_logger_goes_on_where_the_run_does(ran: Ran) -> None:
    """Steps that were done again are there once, whether rank 0 has lived on or not."""
    (version,) = (ran.folder / "run" / "csv").iterdir()
    with open(version / "metrics.csv", newline="") as file:
        steps = [int(row["step"]) for row in csv.DictReader(file) if row["loss"]]
    assert steps == list(range(25)), "Lightning counts from 0"
    assert json.loads((ran.folder / "run" / "loggers" / "csv.json").read_text()) == {"logger": "CSVLogger", "name": 0}


def test_prometheus_is_answered_all_the_time(alone: Ran) -> None:
    assert len(alone.scrapes) > 20 and all(alone.scrapes), "also while workers start, and start again"
    generations = [
        next(v for (name, _), v in one.items() if name == "elastictrain_agent_generation") for one in alone.scrapes
    ]
    assert generations == sorted(generations) and {0, 1} <= set(generations) <= {-1, 0, 1}
    labels = {labels for one in alone.scrapes for name, labels in one if name == "elastictrain_time_step"}
    assert {re.search(r'rank="(\d)"', label)[1] for label in labels} == {"0", "1"}  # type: ignore[index]
    last = alone.scrapes[-1]
    steps = max(value for (name, _), value in last.items() if name == "elastictrain_step")
    losses = [value for (name, _), value in last.items() if name == "elastictrain_train_loss"]
    assert 17 < steps <= 25 and len(losses) == 1


def test_prometheus_has_the_names_of_tensorboard(alone: Ran) -> None:
    accumulator = EventAccumulator(str(alone.folder / "run" / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    tags = {tag: len(accumulator.Scalars(tag)) for tag in accumulator.Tags()["scalars"]}
    told = {name for one in alone.scrapes for name, _ in one}
    often = {
        metric_name(tag) for tag, count in tags.items() if count > 3
    }  # not only between the last scrape and the end
    assert len(often) > 20 and often <= told, often - told
    own = {f"{PREFIX}{name}" for name in ("step", "logged_timestamp_seconds")}
    assert {name for name in told - own if not name.startswith(f"{PREFIX}agent_")} <= set(map(metric_name, tags))


def test_every_panel_of_the_dashboard_has_its_values(alone: Ran) -> None:
    dashboard = json.loads((ROOT / "examples" / "grafana.json").read_text())
    names = {name for one in alone.scrapes for name, _ in one}
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    expressions.append(dashboard["templating"]["list"][1]["query"]["query"])
    assert len(expressions) > 20
    for expression in expressions:
        plain = re.findall(r"elastictrain_\w+", re.sub(r'"[^"]*"', "", expression))
        patterns = re.findall(r'__name__=~"([^"]*)"', expression)
        assert plain or patterns, expression
        assert set(plain) <= names, f"{expression}: nobody tells {set(plain) - names}"
        for pattern in patterns:
            assert any(re.fullmatch(pattern, name) for name in names), f"{expression}: nothing fits {pattern}"
