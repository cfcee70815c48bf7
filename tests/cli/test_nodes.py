"""``elastictrain run --nnodes`` with real trainers: nodes come, go and die, and the losses are those of a quiet run."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from elastictrain import fit
from elastictrain.elastic import crew
from elastictrain.metrics.ledger import read_ledger
from elastictrain.rundir import RunDir
from tests import forked
from tests.checkpoint.nodes import wait_until
from tests.cluster import LIMIT
from tests.matrix import LET_GO, Calm, Matrix


def leader_stopped(run: Matrix) -> None:
    """Until the others go on without it; then it comes back."""
    leader, before = run._leader(), run.generation()
    leader.send(signal.SIGSTOP)
    wait_until(lambda: run.generation() > before, seconds=LIMIT)
    leader.send(signal.SIGCONT)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_nodes_come_go_and_die_and_the_losses_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As reported in kubeflow/trainer#1638, NVRx#348: one pod was deleted, and all restarted; a restored replica gave
    NaN three iterations later. Here each change is one of the mesh, too, and after each the state is compared, bit by bit.
    """
    monkeypatch.setattr(crew, "LET_GO_SECONDS", LET_GO)
    monkeypatch.setattr(fit, "HAND_OVER_SECONDS", 1.0)  # else a keeper that is stopped is waited for that long
    folder = tmp_path / "nodes"
    folder.mkdir()
    run = Matrix.of(folder, "auto", num_nodes=4)
    run.options = [*run.options, "--device-memory", "410KiB"]  # pp=2, dp_shard=2 on four, pp=3 on three, pp=2 on two
    run.before = forked.install
    with run.ending():
        run.begin()
        for change in (
            Matrix.node_killed,
            leader_stopped,
            Matrix.storage_down_as_node_dies,
            Matrix.repair,
            Matrix.keeper_stopped_as_node_leaves,
            Matrix.scaled_down_as_node_dies,
        ):
            before = run.generation()
            change(run)
            if change not in (Matrix.repair, Matrix.scaled_down_as_node_dies):
                run.go_on(after=before)
            assert run.check_states(), change
            run.remember()
    run.check_run(Calm(tmp_path / "calm"))
    changes = [line for line in read_ledger(RunDir(folder / "run")) if line["event"] == "recovery"]
    assert {line["mesh"] for line in changes} >= {"pp=2, dp_shard=2", "pp=3", "pp=2"}, changes
    assert {line["planned"] for line in changes} == {True, False}, changes
