"""``elastictrain run --nnodes`` with real trainers: nodes come, go and die, and the losses are those of a quiet run."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elastictrain import Trainer
from elastictrain.metrics.ledger import read_ledger
from elastictrain.rundir import RunDir
from tests.checkpoint.nodes import wait_until
from tests.cli.net_task import Net
from tests.cli.test_run import NET, Command, logged, workers_of
from tests.cli.test_snapshots import keeper_of

SECONDS = 100.0


class Cluster:
    """Agents on the loopback that share a run directory."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run_dir = folder, folder / "run"
        self.nodes: dict[str, Command] = {}

    def start(self, name: str) -> None:
        (self.folder / name).mkdir()
        options = [f"{NET}:Net", "--run-dir", str(self.run_dir), "--max-steps", "99999", "--log-every", "1"]
        options += ["--set", "pace=0.02", "--set", "lr=0.001", "--snapshot-every", "5", "--micro-batch-size", "1"]
        options += ["--nnodes", "1:3", "--nproc-per-node", "1", "--local-addr", "127.0.0.1", "--rdzv-conf", "ttl=20"]
        self.nodes[name] = Command(self.folder / name, *options, "--spares", "0")

    def kill(self, name: str) -> None:
        """The whole node, with its keeper."""
        run = self.nodes.pop(name)
        pids = [run.pid, *workers_of(run.pid).values(), keeper_of(run.pid)]
        for pid in filter(None, pids):
            os.kill(pid, signal.SIGKILL)
        run.wait()

    def starts(self) -> list[dict[str, Any]]:
        texts = [file.read_text() for file in (self.run_dir / "events").glob("g*-start.jsonl")]
        lines = [json.loads(text) for text in texts if text.endswith("\n")]
        return sorted(lines, key=lambda line: line["generation"])

    def wait(self, world_size: int, *, after: int = 0) -> int:
        """Until so many ranks have trained on together; how many starts there were by then."""

        def is_so() -> bool:
            starts = self.starts() if (self.run_dir / "events").exists() else []
            if len(starts) <= after or starts[-1]["world_size"] != world_size:
                return False
            last = starts[-1]["generation"]
            return any(
                row["generation"] == last and row["step"] > starts[-1]["step"] + 12 for row in rows(self.run_dir)
            )

        wait_until(is_so, seconds=SECONDS)
        return len(self.starts())

    @property
    def text(self) -> str:
        return "\n".join(f"--- {name}\n{run.text}" for name, run in self.nodes.items())


def rows(run_dir: Path) -> list[dict[str, Any]]:
    return [row for row in logged(run_dir) if "train/loss" in row] if (run_dir / "metrics").exists() else []


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    yield made
    for run in made.nodes.values():
        try:
            os.killpg(run.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_nodes_come_go_and_die_and_the_losses_stay(cluster: Cluster, tmp_path: Path) -> None:
    """As reported in kubeflow/trainer#1638, NVRx#348: one pod was deleted, and all restarted; a restored replica gave
    NaN three iterations later."""
    try:
        for name in "ab":
            cluster.start(name)
        seen = cluster.wait(2)
        pids = {name: workers_of(run.pid) for name, run in cluster.nodes.items()}
        cluster.start("c")
        seen = cluster.wait(3, after=seen)
        leaving = cluster.nodes.pop("a")
        os.kill(leaving.pid, signal.SIGTERM)
        assert leaving.wait() == 75, leaving.text
        seen = cluster.wait(2, after=seen)
        planned = cluster.starts()
        assert list(workers_of(cluster.nodes["b"].pid).values()) == list(pids["b"].values()), "its process lives on"
        cluster.kill("c")
        cluster.wait(1, after=seen)
        assert list(workers_of(cluster.nodes["b"].pid).values()) == list(pids["b"].values())
        os.kill(cluster.nodes["b"].pid, signal.SIGTERM)
        assert cluster.nodes["b"].wait() == 75
    except BaseException:
        print(cluster.text)
        raise
    by_step: dict[int, list[dict[str, Any]]] = {}
    for row in rows(cluster.run_dir):
        by_step.setdefault(row["step"], []).append(row)
    last = max(by_step)
    assert sorted(by_step) == list(range(1, last + 1)), "no step is left out"
    calm = planned[-1]["step"]
    assert all(len(by_step[step]) == 1 for step in range(1, calm + 1)), "what is planned repeats no step"
    whole = tmp_path / "whole"
    Trainer(run_dir=str(whole), max_steps=last, log_every=1, micro_batch_size=1).fit(Net(lr=0.001))
    expected = {row["step"]: row["train/loss"] for row in rows(whole)}
    for step, done in by_step.items():
        assert all(abs(row["train/loss"] - expected[step]) < 1e-6 for row in done), step
    changes = [line for line in read_ledger(RunDir(cluster.run_dir)) if line["event"] == "recovery"]
    assert [line["cause"].split()[0] for line in changes] == ["joined", "left", "lost"]
    assert [line["lost_steps"] for line in changes[:2]] == [0, 0]
    assert [line["planned"] for line in changes] == [True, True, False], "only the last one is a failure"
