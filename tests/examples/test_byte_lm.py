"""The byte-level language model: its data, its step under Lightning, and a run of it that learns and continues."""

from __future__ import annotations

import itertools
import json
import math
import sys
from pathlib import Path

import lightning
import pytest
import torch

from elastictrain import UsageError
from examples.byte_lm import ByteLM, Windows, stdlib_text
from tests import cluster, forked
from tests.helpers import elastictrain_command, logged

SMALL = {"dim": 32, "num_layers": 1, "num_heads": 2, "seq_len": 64, "val_samples": 32, "warmup_steps": 5}


def test_files_are_held_out_whole_and_always_the_same_ones() -> None:
    train, held_out = stdlib_text(held_out=False), stdlib_text(held_out=True)
    assert train.dtype == held_out.dtype == torch.uint8
    assert 0.01 < len(held_out) / len(train) < 0.2
    # dataclasses.py is there in every version; its hash puts it on one side only
    source = Path(sys.modules["dataclasses"].__file__ or "").read_bytes()
    assert (source in train.numpy().tobytes()) != (source in held_out.numpy().tobytes())
    stdlib_text.cache_clear()
    assert torch.equal(stdlib_text(held_out=True), held_out)


def test_windows_cover_the_text_once_and_each_knows_its_next_byte() -> None:
    text = torch.arange(100, dtype=torch.uint8)
    windows = Windows(text, seq_len=9)
    assert len(windows) == 11
    assert torch.cat([windows[i][:-1] for i in range(len(windows))]).tolist() == list(range(99))
    assert [int(windows[i][-1]) for i in range(len(windows))] == list(range(9, 100, 9))


def test_validation_is_spread_over_all_held_out_files() -> None:
    data = ByteLM(**SMALL).val_dataset()
    everything = ByteLM(**{**SMALL, "val_samples": 0}).val_dataset()
    assert len(data) == 32
    assert data.indices[-1] > 0.9 * len(everything)
    assert len(everything) == (len(stdlib_text(held_out=True)) - 1) // SMALL["seq_len"]


def test_an_untrained_model_guesses_blindly_and_sees_no_later_byte() -> None:
    torch.manual_seed(0)
    task = ByteLM(**SMALL)
    task.configure_model()
    batch = task.collate_fn([task.val_dataset()[i] for i in range(8)])
    assert task.loss(task(task.inputs(batch)), batch).item() / math.log(2) == pytest.approx(8.0, abs=0.5)
    changed = batch[0].clone()
    changed[:, 40] = (changed[:, 40] + 1) % 256
    before, after = task(batch[0]), task(changed)
    assert torch.equal(before[:, :40], after[:, :40])
    assert not torch.equal(before[:, 40:], after[:, 40:])


def test_the_rate_warms_up_and_decays_to_a_tenth() -> None:
    task = ByteLM(warmup_steps=10, decay_steps=110)
    factors = [task._lr_factor(step) for step in range(200)]
    assert factors[0] == pytest.approx(0.1)
    assert factors[9] == factors[10] == 1.0
    assert all(later < earlier for earlier, later in itertools.pairwise(factors[10:111]))
    assert factors[110:] == pytest.approx([0.1] * 90)


def test_heads_that_do_not_fit_are_refused_in_one_line() -> None:
    with pytest.raises(UsageError, match=r"^dim=30 must be a multiple of 8, twice num_heads=4$"):
        ByteLM(dim=30)


def test_it_runs_under_lightning_too(tmp_path: Path) -> None:
    trainer = lightning.Trainer(
        max_steps=2,
        limit_val_batches=1,
        val_check_interval=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(ByteLM(**SMALL))
    assert trainer.global_step == 2
    assert 5.0 < trainer.callback_metrics["val/bpb"] < 9.0


@pytest.mark.slow
def test_a_run_learns_and_continues_where_it_stopped(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    settings = [part for name, value in SMALL.items() for part in ("--set", f"{name}={value}")]
    common = ("run", "examples/byte_lm.py:ByteLM", "--nproc-per-node", "2", "--run-dir", str(run_dir), *settings)
    sizes = ("--global-batch-size", "16", "--micro-batch-size", "8", "--log-every", "5", "--val-every", "20")
    elastictrain_command(*common, *sizes, "--max-steps", "40")
    first = logged(run_dir, "val/bpb")
    assert sorted(first)[-2:] == [20, 40]
    assert first[40] < first[20] < 7.5
    elastictrain_command(*common, *sizes, "--max-steps", "60")
    assert logged(run_dir, "val/bpb")[60] < first[40]
    losses = logged(run_dir, "train/loss")
    assert sorted(losses) == sorted({*losses, *range(5, 61, 5)})
    assert json.loads((run_dir / "run.json").read_text())["global_batch_size"] == 16


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("dropout", "layouts"),
    [
        (0.1, {"tp=2": 2, "pp=2": 2, "dp_shard=2,pp=2": 4}),
        (0.0, {"cp=2": 2}),  # ranks that share tokens draw numbers of their own
    ],
)
def test_a_run_cut_any_way_is_the_same_run(dropout: float, layouts: dict[str, int], tmp_path: Path) -> None:
    model = {**SMALL, "num_layers": 2, "dropout": dropout}
    settings = [part for name, value in model.items() for part in ("--set", f"{name}={value}")]
    sizes = ("--global-batch-size", "16", "--micro-batch-size", "4", "--log-every", "1", "--val-every", "3")
    for mesh, num_ranks in {"auto": 1, **layouts}.items():
        ranks = (
            "--nproc-per-node",
            str(num_ranks),
            "--mesh",
            mesh,
            "--run-dir",
            str(tmp_path / mesh),
            "--max-steps",
            "3",
        )
        command = ("run", "examples/byte_lm.py:ByteLM", *ranks, *settings, *sizes)
        run = cluster.forked(tmp_path / f"out-{num_ranks}-{mesh}", command, before=forked.install)
        assert run.wait() == 0, run.text
        assert "mesh: " in run.text and all(axis in run.text for axis in mesh.split(",") if mesh != "auto")
    for mesh in layouts:
        for name in ("train/loss", "val/bpb"):
            one, cut = logged(tmp_path / "auto", name), logged(tmp_path / mesh, name)
            assert 3 in one
            assert cut == pytest.approx(one, abs=2e-6), (mesh, name)
