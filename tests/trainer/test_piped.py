"""A run through pipelines: the curve of one process, dropout on; state that any other layout goes on with; refusals."""

from __future__ import annotations

import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from elastictrain import Callback, CheckpointConfig, MeshConfig, Trainer, UsageError
from elastictrain.callbacks import EMA, GradientClipping
from elastictrain.checkpoint import CheckpointReader, resolve
from elastictrain.compat.lightning import LightningModule
from elastictrain.data.slots import Slot
from elastictrain.keeping import collect
from elastictrain.passes import slot_share
from tests.helpers import logged, run_ranks
from tests.parallel.piped import PipedTask, whole
from tests.trainer.tasks import farthest

pytestmark = pytest.mark.filterwarnings("ignore")
slow = pytest.mark.slow


class Catch(Callback):
    """What this rank holds when training begins: everything of the flat state that it would save."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}

    def on_generation_start(self, info: Any) -> None:
        session = info.task.trainer._session
        flat, local = collect(session)
        plain = flat if session.ranks.is_main else {k: v for k, v in flat.items() if isinstance(v, Tensor)}
        self.state = {name: whole(v) if isinstance(v, Tensor) else v for name, v in {**plain, **local}.items()}


def run(
    rank: int, world_size: int, run_dir: Path, mesh: str, steps: int, every: int = 2, task: PipedTask | None = None
) -> tuple[dict[str, Any], list[Tensor]]:
    """Train to ``steps``; what this rank held before, and predictions afterwards."""
    task, catch = task or PipedTask(optimizer="adamw"), Catch()
    trainer = Trainer(
        run_dir=str(run_dir),
        max_steps=steps,
        mesh=mesh,
        global_batch_size=16,
        micro_batch_size=2,
        log_every=1,
        val_every=3,
        callbacks=[GradientClipping(norm=0.3), EMA(decay=0.9), catch],
        checkpoint=CheckpointConfig(every_seconds=None, every_steps=every, keep_last=None),
    )
    trainer.fit(task)
    return catch.state, [whole(one) for one in trainer.predict(task)]


def test_a_slot_of_weight_zero_counts_nothing() -> None:
    """On one rank and in a pipeline alike: nan / inf would make the whole loss nan."""
    session: Any = SimpleNamespace(mesh=SimpleNamespace(shape=SimpleNamespace(cp=1)), part_weight=None)
    weights = {0: 0.0, 1: 3.0}
    work: Any = SimpleNamespace(weights=weights, total_weight=6.0)
    shares = [
        slot_share(session, work, Slot(i, i, None, 2), torch.tensor(loss)) for i, loss in ((0, torch.nan), (1, 4.0))
    ]
    assert [share.item() for share in shares] == [0.0, 2.0]


class Frozen(PipedTask):
    """The first half is frozen, and the optimizer gets what is trained: nothing at all on a stage of that half."""

    def configure_model(self) -> None:
        super().configure_model()
        for module in (self.net.embed, *self.net.blocks[:4]):
            module.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


def made(optimizer: str) -> PipedTask:
    return Frozen(tied=False) if optimizer == "frozen" else PipedTask(optimizer=optimizer)


@functools.cache
def one_process(folder: Path, steps: int, optimizer: str) -> tuple[dict[int, float], dict[int, float], list[Tensor]]:
    run_dir = folder / f"whole-{steps}-{optimizer}"
    ((_, predictions),) = run_ranks(run, 1, run_dir, "auto", steps, 2, made(optimizer))
    return logged(run_dir, "train/loss"), logged(run_dir, "val/loss"), predictions


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("piped")


@pytest.mark.parametrize("optimizer", ["sgd", pytest.param("adamw", marks=slow)])
@pytest.mark.parametrize(
    ("world_size", "mesh"),
    [
        (2, "pp=2"),
        *(
            pytest.param(world_size, mesh, marks=slow)
            for world_size, mesh in (
                (4, "pp=4"),
                (3, "pp=3,pp_split=net.blocks.1+net.blocks.6"),
                (4, "dp_shard=2,pp=2"),
                (4, "dp_replicate=2,pp=2,pp_schedule=ZBV"),
                (2, "pp=2,pp_schedule=Interleaved1F1B"),
            )
        ),
    ],
)
def test_the_curve_of_one_process(world_size: int, mesh: str, optimizer: str, folder: Path, tmp_path: Path) -> None:
    """Five steps, an epoch's short last one among them: dropout, a tied head, clipping, averaged weights."""
    train, val, predictions = one_process(folder, 5, optimizer)
    for _, theirs in run_ranks(run, world_size, tmp_path, mesh, 5, 2, PipedTask(optimizer=optimizer)):
        assert len(theirs) == len(predictions)
        for a, b in zip(theirs, predictions, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert farthest(logged(tmp_path, "train/loss"), train) <= 1e-6
    assert farthest(logged(tmp_path, "val/loss"), val) <= 1e-6


FROZEN = [(4, "pp=4"), (4, "dp_shard=2,pp=2"), (2, "pp=2,pp_schedule=ZBV"), (1, "auto"), (2, "pp=2")]


@pytest.mark.parametrize(
    ("chain", "optimizer", "num_averaged"),
    [
        ([(1, "auto"), (2, "pp=2"), (1, "auto")], "adamw", 35),  # the tied weight once
        pytest.param(FROZEN, "frozen", 19, marks=slow),  # those that are trained
    ],
    ids=["short", "frozen"],
)
def test_other_layouts_go_on_with_all_of_the_state(
    chain: list[tuple[int, str]], optimizer: str, num_averaged: int, folder: Path, tmp_path: Path
) -> None:
    train, _, _ = one_process(folder, 2 * len(chain), optimizer)
    saved: dict[str, Any] = {}
    for leg, (world_size, mesh) in enumerate(chain, start=1):
        together: dict[str, Any] = {}
        for state, _ in run_ranks(run, world_size, tmp_path, mesh, 2 * leg, 2, made(optimizer)):
            for name, value in state.items():
                assert name not in together or _same(together[name], value), f"two ranks differ in {name}"
                together[name] = value
        if saved:
            assert together.keys() == saved.keys()
            assert not [name for name, value in saved.items() if not _same(together[name], value)]
        reader = CheckpointReader(resolve(str(tmp_path)))
        tensors = {name: torch.empty(spec.shape, dtype=spec.dtype) for name, spec in reader.tensors.items()}
        reader.load(tensors)
        saved = {**tensors, **reader.values}
        assert sum(name.startswith("ema.") for name in saved) == num_averaged
    assert farthest(logged(tmp_path, "train/loss"), train) <= 1e-6


def _same(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else bool(a == b)


# ---- refusals ------------------------------------------------------------------------------------------------------


class OwnStep(PipedTask):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.loss(self(self.inputs(batch)), batch)


class Manual(PipedTask):
    automatic_optimization = False


class OwnBackward(PipedTask):
    def on_after_backward(self) -> None:
        pass


class TrainsNothing(PipedTask):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([], lr=0.1)


class Plain(LightningModule):
    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> None:
        pass


def _refuse(rank: int, world_size: int, task: Any, mesh: str, options: dict[str, Any]) -> str:
    try:
        Trainer(mesh=mesh, max_steps=1, **{"global_batch_size": 8, "micro_batch_size": 2, **options}).fit(task)
    except UsageError as error:
        return str(error)
    return "trained"


@pytest.mark.parametrize(
    ("task", "mesh", "options", "message"),
    [
        (
            OwnStep(),
            "pp=2",
            {},
            "OwnStep.training_step() is its own, and a pipeline's stages each run a part of a step",
        ),
        (Plain(), "pp=2", {}, "Plain is a LightningModule, whose training_step() is one piece"),
        (Manual(), "pp=2", {}, "Manual has manual optimisation, which a pipeline cannot run"),
        (OwnBackward(), "pp=2", {}, "OwnBackward.on_after_backward() is overridden"),
        (
            TrainsNothing(),
            "pp=2",
            {},
            "TrainsNothing.configure_optimizers() gives the optimizer no parameter, on any stage",
        ),
        (PipedTask(), "pp=2", {"micro_batch_size": 8}, "a pipeline of 2 stages needs 2 to be busy"),
        (PipedTask(), "pp=2", {"micro_batch_size": 3}, "global_batch_size=8 in slots of 3 leaves a smaller one"),
        (PipedTask(), "pp=2,pp_split=net.block.1", {}, "pp_split names 'net.block.1', where the model cannot be cut"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, LightningModule) else None,
)
def test_what_a_pipeline_cannot_do_is_refused(task: Any, mesh: str, options: dict[str, Any], message: str) -> None:
    for text in run_ranks(_refuse, 2, task, mesh, options):
        assert message in text, text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pp=2,pp_schedule=2F2B", "pp_schedule='2F2B' is unknown: use one of GPipe, 1F1B"),
        ("dp_shard=2,pp_schedule=GPipe", "pp_schedule and pp_split are of a pipeline: add the axis, pp=2"),
    ],
)
def test_a_mesh_text_that_cannot_be(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        MeshConfig.parse(text)


def test_a_mesh_as_text() -> None:
    mesh = MeshConfig.parse("dp_shard=2, pp=2, pp_schedule=zbvzerobubble, pp_split=a.1+a.2+a.3")
    assert (mesh.pp, mesh.pp_schedule, mesh.pp_split) == (2, "ZBV", ("a.1", "a.2", "a.3"))
    assert MeshConfig.parse(str(mesh)) == mesh
    with pytest.raises(UsageError, match="pp_split='blocks.2' is one name"):
        MeshConfig(pp=2, pp_split="blocks.2")  # type: ignore[arg-type]
