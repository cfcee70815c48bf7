"""The trainer as a whole: what a run leaves, what it goes on from, what it refuses."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from elastictrain import Callback, CheckpointConfig, MeshConfig, Task, Trainer, UsageError, runfile
from elastictrain.callback import RunInfo, SaveInfo, StepInfo, ValidationInfo
from elastictrain.callbacks import EMA, EarlyStopping, GradientAccumulation, GradientClipping, MixedPrecision
from elastictrain.checkpoint import CheckpointReader, interval, resolve
from elastictrain.errors import CheckpointError
from elastictrain.metrics.ledger import Ledger
from elastictrain.rundir import RunDir
from tests.helpers import RankError, logged, run_ranks
from tests.trainer.tasks import Recorded, farthest, train

pytestmark = pytest.mark.filterwarnings("ignore")

CONFIG = CheckpointConfig(every_seconds=None, keep_last=None)


def _fit(run_dir: Path | None, steps: int, *, task: Any = None, **options: Any) -> Trainer:
    options = {"global_batch_size": 24, "log_every": 1, "checkpoint": CONFIG, **options}
    trainer = Trainer(run_dir=None if run_dir is None else str(run_dir), max_steps=steps, **options)
    trainer.fit(Recorded() if task is None else task)
    return trainer


# ---- what a run leaves ---------------------------------------------------------------------------------------------


def test_the_run_directory(tmp_path: Path) -> None:
    trainer = _fit(tmp_path, 6, seed=3)
    content = json.loads((tmp_path / "run.json").read_text())
    assert content["target"] == "tests.trainer.tasks:Recorded"
    assert (content["global_batch_size"], content["micro_batch_size"], content["seed"]) == (24, 3, 3)
    assert content["hparams"] == {}
    assert content["versions"].keys() >= {"python", "torch", "lightning", "elastictrain"}
    assert sorted(logged(tmp_path, "train/loss")) == list(range(1, 7))
    assert sorted(logged(tmp_path, "val/loss")) == [5], "an epoch is five steps"
    assert list((tmp_path / "tensorboard").iterdir())
    assert trainer.metrics["train/loss"] == logged(tmp_path, "train/loss")[6]
    line = json.loads(next((tmp_path / "metrics").glob("*.jsonl")).read_text().splitlines()[0])
    assert line.keys() >= {"step", "samples", "time", "generation", "epoch", "train/loss", "time/step", "time/data"}
    assert (line["step"], line["samples"]) == (1, 24)


def test_the_state_that_is_kept(tmp_path: Path) -> None:
    _fit(tmp_path, 7, callbacks=[EMA(decay=0.5), MixedPrecision("fp16")])
    reader = CheckpointReader(resolve(str(tmp_path)))
    names = reader.tensors.keys() | reader.values.keys()
    weights = ["first.weight", "blocks.1.norm.bias"]
    for name in weights:
        assert names >= {f"model.{name}", f"optim.0.{name}.exp_avg", f"pg.0.{name}.lr", f"ema.{name}"}
    assert names >= {"scheduler.0", "trainer.step", "trainer.seed", "trainer.scaler", "data.consumed", "metrics.log"}
    assert reader.values["trainer.samples"] == 148
    assert reader.values["data.consumed"] == 48 and reader.values["data.epoch"] == 1
    assert reader.values["trainer.scaler"]["scale"] > 1


def test_nothing_is_kept_without_a_run_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _fit(None, 2)
    assert list(tmp_path.iterdir()) == []


def test_every_so_many_steps_and_the_newest_are_kept(tmp_path: Path) -> None:
    _fit(tmp_path, 11, checkpoint=CheckpointConfig(every_steps=3, every_seconds=None, keep_last=2))
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step-00000009", "step-00000011"]


def test_by_time(tmp_path: Path) -> None:
    config = CheckpointConfig(every_seconds=1e-9, at_end=False, keep_last=None)
    _fit(tmp_path, 9, checkpoint=config, log_every=4)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step-00000004", "step-00000008"]


def test_as_often_as_is_best(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first save comes after a fixed time; what it cost, and the cut-short start before this one, give the next."""
    monkeypatch.setattr(interval, "UNKNOWN", 1e-9)
    cut_short = Ledger(RunDir(tmp_path), generation=0)
    cut_short.started(step=0, world_size=1)
    config = CheckpointConfig(every_seconds="auto", keep_last=None)
    _fit(tmp_path, 9, checkpoint=config, log_every=2)
    steps = sorted(p.name for p in (tmp_path / "checkpoints").iterdir())
    assert steps[0] == "step-00000002" and steps[-1] == "step-00000009" and len(steps) <= 3
    text = capsys.readouterr().out
    assert re.search(
        r"elastictrain: checkpoints every .*: one costs training .* s, and a failure comes every 3 h \(1 in", text
    )
    assert re.search(r"host memory: up to \d+ KiB on each node for saves\n", text), text
    starts = sorted(path.name for path in (tmp_path / "events").glob("*-[se]*.jsonl"))
    assert starts == ["g000000-start.jsonl", "g000001-end.jsonl", "g000001-start.jsonl"]
    assert (
        CheckpointReader(str(next((tmp_path / "checkpoints" / "step-00000009").iterdir()))).values["trainer.seconds"]
        > 0
    )


# ---- going on ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("callbacks", [list, lambda: [EMA(decay=0.9), GradientClipping(norm=0.1)]])
def test_a_run_goes_on_as_if_it_had_not_stopped(callbacks: Any, tmp_path: Path) -> None:
    whole, task = Recorded(), Recorded()
    _fit(tmp_path / "whole", 13, task=whole, callbacks=callbacks())
    _fit(tmp_path / "parts", 7, callbacks=callbacks())
    _fit(tmp_path / "parts", 13, task=task, callbacks=callbacks())
    assert logged(tmp_path / "parts", "train/loss") == logged(tmp_path / "whole", "train/loss")
    assert logged(tmp_path / "parts", "val/loss") == logged(tmp_path / "whole", "val/loss")
    for (name, a), b in zip(whole.state_dict().items(), task.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


def test_a_finished_run_has_nothing_to_do(tmp_path: Path) -> None:
    _fit(tmp_path, 4)
    task = Recorded()
    _fit(tmp_path, 4, task=task)
    assert task.seen == {}
    assert len(list((tmp_path / "checkpoints").iterdir())) == 1


def test_starting_from_another_run(tmp_path: Path) -> None:
    _fit(tmp_path / "a", 5)
    _fit(tmp_path / "b", 8, resume=str(tmp_path / "a"))
    assert sorted(logged(tmp_path / "b", "train/loss")) == [6, 7, 8]
    _fit(tmp_path / "b", 9, resume=str(tmp_path / "a"))  # its own newest one counts by now
    assert sorted(logged(tmp_path / "b", "train/loss")) == [6, 7, 8, 9]


class OtherModel(Recorded):
    def configure_model(self) -> None:
        super().configure_model()
        self.extra = nn.Linear(2, 2)


class OtherShape(Recorded):
    def configure_model(self) -> None:
        super().configure_model()
        self.first = nn.Linear(8, 16, bias=False)
        self.blocks[0].norm = nn.LayerNorm(16, elementwise_affine=False)


class OtherOptimizer(Recorded):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class LessData(Recorded):
    def train_dataset(self) -> Any:
        return torch.utils.data.Subset(super().train_dataset(), range(90))


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (OtherModel, r"the checkpoint lacks model.extra.bias, model.extra.weight: it is of another model"),
        (OtherShape, r"the checkpoint also holds model.blocks.0.norm.bias, .* which this model does not have"),
        (OtherOptimizer, r"pg\.0\.first\.weight\.dampening|scheduler|momentum"),
        (LessData, r"the dataset has 90 samples, and had 100 when the checkpoint was saved"),
    ],
)
def test_a_checkpoint_that_does_not_fit(task: type[Recorded], message: str, tmp_path: Path) -> None:
    _fit(tmp_path / "a", 5)
    before = sorted(p for p in tmp_path.rglob("*"))
    with pytest.raises(CheckpointError, match=message):
        _fit(tmp_path / "b", 8, task=task(), resume=str(tmp_path / "a"))
    assert sorted(p for p in tmp_path.rglob("*")) == before, "nothing was written"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"global_batch_size": 12}, r"it was started with global_batch_size 24, now 12; choose another --run-dir"),
        ({"micro_batch_size": 6}, r"it was started with micro_batch_size 3, now 6"),
        ({"seed": 1}, r"it was started with seed 0, now 1"),
        (
            {"task": OtherOptimizer()},
            r"it belongs to tests.trainer.tasks:Recorded, now tests.trainer.test_trainer:Other",
        ),
        ({"resume": "never"}, r"--resume never, but .* holds checkpoints"),
    ],
)
def test_another_run_in_this_directory(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    _fit(tmp_path, 3)
    before = sorted(p for p in tmp_path.rglob("*"))
    with pytest.raises(UsageError, match=message) as refused:
        _fit(tmp_path, 5, **options)
    assert "\n" not in str(refused.value)
    assert sorted(p for p in tmp_path.rglob("*")) == before


def test_a_setting_of_nan_is_the_same_again(tmp_path: Path) -> None:
    content = json.loads(json.dumps({"settings": {"floor": math.nan, "dim": 3}}))
    runfile.check(RunDir(tmp_path), content, {"settings": {"dim": 3, "floor": math.nan}})
    with pytest.raises(UsageError, match="started with --set floor=nan dim=3, now floor=0.0 dim=3; choose another"):
        runfile.check(RunDir(tmp_path), content, {"settings": {"floor": 0.0, "dim": 3}})


# ---- refused at once -----------------------------------------------------------------------------------------------


class Watching(Callback):
    """Notes every call."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def on_fit_start(self, info: RunInfo) -> None:
        self.calls.append(("fit_start", info.step, info.num_slots))

    def on_generation_start(self, info: RunInfo) -> None:
        self.calls.append(("generation_start", info.generation))

    def on_step_end(self, info: StepInfo) -> None:
        assert isinstance(info.loss, Tensor)
        shown = {name: round(value.item(), 3) for name, value in info.progress.items()}
        self.calls.append(("step", info.step, info.samples, info.metrics is not None, sorted(shown)))

    def on_validation_start(self, info: RunInfo) -> None:
        self.calls.append("validation_start")

    def on_validation_end(self, info: ValidationInfo) -> None:
        self.calls.append(("validation_end", info.step, sorted(info.metrics)))

    def on_save(self, info: SaveInfo) -> None:
        self.calls.append(("save", info.step, info.num_bytes > 0))

    def on_exception(self, error: BaseException) -> None:
        self.calls.append(("exception", str(error)))

    def on_generation_end(self, info: RunInfo) -> None:
        self.calls.append(("generation_end", info.step))

    def on_fit_end(self, info: RunInfo) -> None:
        self.calls.append("fit_end")

    def state_dict(self) -> dict[str, Any]:
        return {"count": len(self.calls), "tensor": torch.tensor([1.5]), "nested": {"a": (1, math.inf)}}

    def load_state_dict(self, state: Any) -> None:
        self.calls.append(("load", sorted(state), state["tensor"].tolist(), state["nested"]))


class Rate(Recorded):
    def __init__(self, kind: type[torch.optim.Optimizer], lr: Any) -> None:
        super().__init__()
        self.kind, self.lr = kind, lr

    def configure_optimizers(self) -> Any:
        return self.kind(self.parameters(), lr=self.lr)  # type: ignore[call-arg]


class Frozen(Recorded):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if not p.requires_grad], lr=0.1)


class RaisesThere(Recorded):
    def configure_optimizers(self) -> Any:
        raise ValueError("of my own")


class NoData(Task):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(1, 1)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("options", "task", "message"),
    [
        ({"max_steps": None}, Recorded(), "how long to train is not known: give max_steps or max_epochs"),
        ({"max_steps": -1}, Recorded(), "max_steps=-1 must be a whole number of at least 0"),
        ({"log_every": 0}, Recorded(), "log_every=0 must be a whole number of at least 1"),
        ({"global_batch_size": 2, "micro_batch_size": 4}, Recorded(), "raise the first to 4, or lower the second"),
        ({"global_batch_size": None}, Recorded(), "the global batch size is not known"),
        ({"mesh": "dp_shard=2"}, Recorded(), "mesh dp_shard=2 needs 2 ranks and there are 1"),
        ({"mesh": "tp=2"}, Recorded(), "mesh tp=2 needs 2 ranks and there are 1"),
        (
            {"mesh": "cp=2"},
            Recorded(),
            "mesh axis cp=2: Recorded has no context_parallel_plan",
        ),
        ({"mesh": "dp=2"}, Recorded(), "'dp' is not a mesh axis; the axes are tp, cp, dp_shard, dp_replicate, pp"),
        ({"run_dir": "nope://x"}, Recorded(), "unknown URL scheme nope://"),
        ({"run_dir": "/dev/null/x"}, Recorded(), "run directory /dev/null/x cannot be written"),
        ({"callbacks": [3]}, Recorded(), "callbacks: 3 is a int"),
        (
            {"callbacks": [GradientAccumulation(micro_batch_size=2)], "micro_batch_size": 4},
            Recorded(),
            "micro_batch_size=4, and a callback sets it to 2: keep one",
        ),
        (
            {"callbacks": [GradientClipping(norm=1.0), GradientClipping(norm=2.0)]},
            Recorded(),
            r"callbacks GradientClipping and GradientClipping both set clip_norm \(1.0 and 2.0\): keep one of them",
        ),
        ({}, Rate(torch.optim.SGD, math.nan), "SGD has lr=nan: give lr a number"),
        ({}, Rate(torch.optim.AdamW, math.inf), "AdamW has lr=inf: give lr a number"),
        ({}, Rate(torch.optim.SGD, torch.tensor(math.nan)), "SGD has lr=nan: give lr a number"),
        ({}, Rate(torch.optim.AdamW, math.nan), r"Rate.configure_optimizers\(\): Invalid learning rate: nan: correct"),
        ({}, Rate(torch.optim.SGD, -1.0), r"Rate.configure_optimizers\(\): Invalid learning rate: -1.0: correct"),
        ({}, Frozen(), r"Frozen.configure_optimizers\(\): optimizer got an empty parameter list: correct"),
        ({"callbacks": Watching()}, Recorded(), "callbacks=.*Watching.* must be a list"),
        ({"mesh": None}, Recorded(), 'mesh=None must be "auto", axes such as "dp_shard=2", or a MeshConfig'),
        ({"checkpoint": 5}, Recorded(), "checkpoint=5 must be a CheckpointConfig"),
        ({"run_dir": 3}, Recorded(), "run_dir=3 must be a path or URL, or None"),
        ({"resume": None}, Recorded(), 'resume=None must be "auto", "never", a path or URL, or Weights'),
        ({"loggers": True}, Recorded(), "loggers=True must be a list of Lightning loggers"),
        ({}, nn.Linear(1, 1), "Linear is neither an elastictrain.Task nor a lightning.pytorch.LightningModule"),
        ({}, NoData(), r"NoData has no training data: define train_dataset\(\) or train_dataloader\(\)"),
    ],
)
def test_refused(options: dict[str, Any], task: Any, message: str, tmp_path: Path) -> None:
    everything = {"run_dir": str(tmp_path / "run"), "max_steps": 2, "global_batch_size": 24, **options}
    with pytest.raises(UsageError, match=message) as refused:
        Trainer(**everything).fit(task)
    assert "\n" not in str(refused.value)
    assert list(tmp_path.iterdir()) == [], "nothing was written"


def test_an_error_of_the_users_own_stays_one(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="of my own") as raised:
        _fit(tmp_path, 2, task=RaisesThere())
    assert not isinstance(raised.value, UsageError)


# ---- callbacks -----------------------------------------------------------------------------------------------------


def test_what_callbacks_are_told(tmp_path: Path) -> None:
    watching = Watching()
    _fit(tmp_path, 3, callbacks=[watching], log_every=2, val_every=2)
    assert watching.calls == [
        ("fit_start", 0, 8),
        ("generation_start", 0),
        "validation_start",
        ("validation_end", 0, ["val/loss"]),
        ("step", 1, 24, False, ["val/loss"]),
        ("step", 2, 48, True, ["val/loss"]),
        "validation_start",
        ("validation_end", 2, ["val/loss"]),
        ("step", 3, 72, False, ["val/loss"]),
        "validation_start",
        ("validation_end", 3, ["val/loss"]),
        ("save", 3, True),
        ("generation_end", 3),
        "fit_end",
    ]
    again = Watching()
    _fit(tmp_path, 4, callbacks=[again])
    assert again.calls[0] == ("load", ["count", "nested", "tensor"], [1.5], {"a": (1, math.inf)})
    assert again.calls[1] == ("fit_start", 3, 8)


def test_an_exception_is_told_and_raised(tmp_path: Path) -> None:
    class Failing(Recorded):
        def on_train_batch_end(self, *args: Any) -> None:
            if self.global_step == 2:
                raise RuntimeError("out of ideas")

    watching = Watching()
    with pytest.raises(RuntimeError, match="out of ideas"):
        _fit(tmp_path, 9, task=Failing(), callbacks=[watching])
    assert watching.calls[-1] == ("exception", "out of ideas")
    assert sorted(logged(tmp_path, "train/loss")) == [1], "what was logged before is there"


def test_early_stopping_stops(tmp_path: Path) -> None:
    stopping = EarlyStopping("val/loss", patience=1, min_delta=100.0)
    trainer = _fit(None, 100, callbacks=[stopping], val_every=2)
    assert trainer.metrics["train/loss"] > 0
    task = Recorded()
    _fit(None, 100, task=task, callbacks=[EarlyStopping("val/loss", patience=1, min_delta=100.0)], val_every=2)
    assert max(task.seen) < (0, 40)


def test_a_run_that_was_stopped_early_stays_stopped(tmp_path: Path) -> None:
    def again(patience: int) -> int:
        task, stopping = Recorded(), EarlyStopping("val/loss", patience=patience, min_delta=100.0)
        _fit(tmp_path, 12, task=task, callbacks=[stopping], val_every=2)
        return len(task.seen)

    assert again(1) > 0
    assert again(1) == 0
    assert again(2) > 0, "until more is asked for"
    assert again(2) == 0


# ---- precision and clipping on a mesh ------------------------------------------------------------------------------


def _with(rank: int, world_size: int, run_dir: Path, mesh: str, kind: str) -> Any:
    callbacks: dict[str, Any] = {
        "clip": lambda: [GradientClipping(norm=0.05)],
        "value": lambda: [GradientClipping(value=0.01)],
        "ema": lambda: [EMA(decay=0.8)],
        "bf16": lambda: [MixedPrecision("bf16")],
        "fp16": lambda: [MixedPrecision("fp16")],
    }
    task = Recorded()
    train(task, run_dir, mesh, 12, callbacks=callbacks[kind](), val_every=4)
    dtypes = {str(p.dtype) for p in task.parameters()}
    return dtypes, any(isinstance(p, DTensor) for p in task.parameters())


@pytest.mark.parametrize(
    ("kind", "tolerance"),
    [
        ("clip", 1e-6),
        pytest.param("value", 1e-6, marks=pytest.mark.slow),
        pytest.param("ema", 1e-6, marks=pytest.mark.slow),
        pytest.param("bf16", 2e-2, marks=pytest.mark.slow),
        pytest.param("fp16", 5e-3, marks=pytest.mark.slow),
    ],
)
def test_callbacks_on_any_mesh(kind: str, tolerance: float, tmp_path: Path) -> None:
    run_ranks(_with, 1, tmp_path / "one", "auto", kind)
    for mesh, world_size in (("dp_replicate=2", 2), ("dp_shard=2", 2)):
        for dtypes, is_sharded in run_ranks(_with, world_size, tmp_path / mesh, mesh, kind):
            assert dtypes == {"torch.float32"}, "the weights themselves stay fp32"
            assert is_sharded == (mesh == "dp_shard=2")
        for name in ("train/loss", "val/loss"):
            assert farthest(logged(tmp_path / mesh, name), logged(tmp_path / "one", name)) <= tolerance, (mesh, name)


def test_averages_serve_validation_only(tmp_path: Path) -> None:
    plain, averaged = Recorded(), Recorded()
    _fit(tmp_path / "plain", 8, task=plain, val_every=4)
    _fit(tmp_path / "ema", 8, task=averaged, val_every=4, callbacks=[EMA(decay=0.9)])
    assert logged(tmp_path / "plain", "train/loss") == logged(tmp_path / "ema", "train/loss")
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), averaged.parameters(), strict=True))
    after = {step: value for step, value in logged(tmp_path / "plain", "val/loss").items() if step}
    assert all(abs(value - after[step]) > 1e-4 for step, value in logged(tmp_path / "ema", "val/loss").items() if step)


# ---- evaluation ----------------------------------------------------------------------------------------------------


def _evaluate(rank: int, world_size: int, run_dir: Path, mesh: str) -> Any:
    class Predicting(Recorded):
        def predict_dataset(self) -> Any:
            return self.val_dataset()

        def test_dataset(self) -> Any:
            return self.val_dataset()

    options: dict[str, Any] = {"micro_batch_size": 7, "mesh": mesh}
    fresh = Trainer(**options).validate(Predicting(), checkpoint=str(run_dir))
    tested = Trainer(**options).test(Predicting(), checkpoint=str(run_dir))
    predicted = Trainer(**options).predict(Predicting(), checkpoint=str(run_dir))
    return fresh, tested, torch.cat(predicted)


def test_evaluation_on_any_mesh(tmp_path: Path) -> None:
    _fit(tmp_path, 5, val_every=5)
    expected = logged(tmp_path, "val/loss")[5]
    ((fresh, tested, predicted),) = run_ranks(_evaluate, 1, tmp_path, "auto")
    assert fresh[0]["val/loss"] == pytest.approx(expected, rel=1e-6, abs=1e-6)
    assert tested[0]["test/loss"] == pytest.approx(expected, rel=1e-6, abs=1e-6)
    assert predicted.shape == (100, 1)
    for mesh, world_size in (("dp_replicate=3", 3), ("dp_shard=2", 2)):
        for values, tests, outputs in run_ranks(_evaluate, world_size, tmp_path, mesh):
            assert values[0]["val/loss"] == pytest.approx(expected, rel=1e-6, abs=1e-6)
            assert tests[0]["test/loss"] == pytest.approx(expected, rel=1e-6, abs=1e-6)
            torch.testing.assert_close(outputs, predicted, atol=1e-6, rtol=1e-5)


def _fit_and_validate(rank: int, world_size: int, mesh: str) -> Any:
    task = Recorded()
    options: dict[str, Any] = {"global_batch_size": 24, "mesh": mesh}
    trainer = Trainer(max_steps=5, **options)
    trainer.fit(task)
    last = trainer.metrics.get("val/loss")
    again = Trainer(micro_batch_size=3, mesh=mesh).validate(task)[0]["val/loss"]
    task.seen = {}
    Trainer(max_steps=2, **options).fit(task)
    return last, again, sum(p.numel() for p in task.parameters())


@pytest.mark.parametrize(("mesh", "world_size"), [("auto", 1), ("dp_replicate=2", 2), ("dp_shard=2", 2)])
def test_a_task_can_be_used_again(mesh: str, world_size: int) -> None:
    for last, again, num_parameters in run_ranks(_fit_and_validate, world_size, mesh):
        assert num_parameters == 769
        assert last is None or again == pytest.approx(last, rel=1e-6, abs=1e-6)


# ---- under lightning.Trainer ---------------------------------------------------------------------------------------


def test_a_task_runs_under_lightning() -> None:
    class Small(Recorded):
        batch_size = 4

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return Task.training_step(self, batch, batch_idx)

    trainer = pl.Trainer(
        accelerator="cpu", max_steps=3, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, limit_val_batches=2, num_sanity_val_steps=0,
    )  # fmt: skip
    task = Small()
    trainer.fit(task)
    assert trainer.global_step == 3
    assert math.isfinite(trainer.validate(task, verbose=False)[0]["val/loss"])


# ---- other ways to say it ------------------------------------------------------------------------------------------


def test_loaders_as_arguments_and_mesh_as_config(tmp_path: Path) -> None:
    data = TensorDataset(torch.randn(10, 8), torch.randn(10, 1), torch.arange(10))
    task = Recorded()
    Trainer(max_epochs=2, mesh=MeshConfig("auto")).fit(
        task, train_dataloaders=DataLoader(data, batch_size=5), val_dataloaders=[DataLoader(data), DataLoader(data)]
    )
    assert task.seen == {(e, b): list(range(5 * b, 5 * b + 5)) for e in (0, 1) for b in (0, 1)}


def _memory(rank: int, world_size: int) -> None:
    Trainer(run_dir="memory://run", max_steps=1, global_batch_size=24).fit(Recorded())


def test_memory_is_for_one_process(tmp_path: Path) -> None:
    _fit(None, 1)
    Trainer(run_dir="memory://one", max_steps=2, global_batch_size=24).fit(Recorded())
    Trainer(run_dir="memory://one", max_steps=3, global_batch_size=24).fit(Recorded())
    with pytest.raises(RankError, match="memory:// is seen by one process only; use a path or an object store"):
        run_ranks(_memory, 2)


def test_on_an_object_store(s3_url: str) -> None:
    Trainer(run_dir=s3_url, max_steps=3, global_batch_size=24).fit(Recorded())
    task = Recorded()
    Trainer(run_dir=s3_url, max_steps=5, global_batch_size=24).fit(task)
    assert len(task.seen) == 8 + 2
