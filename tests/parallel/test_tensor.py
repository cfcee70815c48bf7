"""Tensor parallelism: the numbers of one rank, whatever the plan, the mesh and the model; and every refusal."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel

from elastictrain import Trainer, UsageError
from elastictrain.parallel.plans import STYLES, read_plan
from examples.byte_lm import ByteLM
from tests.helpers import RankError, apart, run_ranks
from tests.parallel.llama import Llama, Options, Seen, steps_of, variant

pytestmark = pytest.mark.filterwarnings("ignore")

TOLERANCE = 1e-6


def _run(rank: int, world_size: int, options: Options, mesh: str, more: dict[str, Any]) -> Seen:
    return steps_of(options, mesh, **more)


@cache
def _one_rank(options: Options, more: tuple[tuple[str, Any], ...]) -> Seen:
    seen: Seen = run_ranks(_run, 1, options, "auto", dict(more))[0]
    return seen


def check(options: Options, world_size: int, mesh: str, **more: Any) -> Seen:
    """Train on the mesh and compare everything with one rank."""
    one = _one_rank(dataclasses.replace(options, plan="plain", units=False), tuple(sorted(more.items())))
    ranks = run_ranks(_run, world_size, options, mesh, more, timeout=150)
    for seen in ranks:
        assert seen.losses == ranks[0].losses, "every rank reports the same"
        assert seen.losses.keys() == one.losses.keys()
        assert max(apart(seen.losses[step], one.losses[step]) for step in one.losses) <= TOLERANCE
        assert max(apart(a, b) for a, b in zip(seen.norms, one.norms, strict=True)) <= TOLERANCE
        assert seen.trainable == one.trainable
        # Where a gradient is nothing but rounding, Adam makes a step of it.
        for_weights = 5e-3 if options.optimizer == "adamw" else 2e-5
        for mine, expected, atol in ((seen.weights, one.weights, for_weights), (seen.state, one.state, 2e-5)):
            assert mine.keys() == expected.keys()
            for name, tensor in expected.items():
                torch.testing.assert_close(mine[name], tensor, rtol=1e-4, atol=atol, msg=name)
    first: Seen = ranks[0]
    return first


slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("options", "world_size", "mesh"),
    [
        (variant(), 2, "tp=2"),
        (variant(plan="loss", tied=True, optimizer="adamw"), 2, "tp=2"),
        (variant(plan="plain", dropout=0.1, vocab=65), 2, "tp=2"),
        (variant(frozen=("n1", "layers.0.", "embed"), units=True), 4, "dp_shard=2,tp=2"),
        pytest.param(variant(frozen=("n1", "layers.0."), tied=True), 2, "tp=2", marks=slow),
        pytest.param(variant(plan="loss", vocab=65, frozen=("embed",)), 2, "tp=2", marks=slow),
        pytest.param(variant(defer=False, tied=True), 2, "tp=2", marks=slow),
        pytest.param(variant(vocab=65, optimizer="adamw"), 4, "tp=4", marks=slow),
        pytest.param(variant(plan="loss", vocab=65), 4, "tp=4", marks=slow),
        pytest.param(variant(tied=True, plan="loss"), 4, "dp_replicate=2,tp=2", marks=slow),
        pytest.param(variant(plan="plain", vocab=65, dropout=0.1), 4, "dp_replicate=2,tp=2", marks=slow),
        pytest.param(variant(plan="loss", optimizer="adamw", units=True), 4, "dp_shard=2,tp=2", marks=slow),
        pytest.param(variant(plan="plain", tied=True, dropout=0.1), 4, "dp_shard=2,tp=2", marks=slow),
        pytest.param(variant(defer=False), 4, "dp_shard=2,tp=2", marks=slow),
        pytest.param(variant(tied=True), 8, "dp_replicate=2,dp_shard=2,tp=2", marks=slow),
    ],
    ids=str,
)
def test_the_numbers_of_one_rank(options: Options, world_size: int, mesh: str) -> None:
    seen = check(options, world_size, mesh)
    assert all((" " if "dp_" in mesh else "Shard") in seen.placements[f"layers.0.{n}.weight"] for n in ("up", "down"))


@slow
@pytest.mark.parametrize("mesh", ["dp_shard=2,tp=2", "dp_replicate=2,tp=2"])
def test_ranks_without_a_slot_and_validations(mesh: str) -> None:
    """Five slots on two data-parallel ranks, with hooks of tensor parallelism on the units; odd validations."""
    more = {"global_batch_size": 10, "val_every": 2, "steps": 4}
    seen = check(variant(units=True), 4, mesh, **more)
    assert len(seen.losses) == 4


# ---- initial weights -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("world_size", "mesh"), [(2, "tp=2"), pytest.param(4, "dp_shard=2,tp=2", marks=slow)], ids=str)
@pytest.mark.parametrize("options", [variant(vocab=65), variant(tied=True, plan="plain")], ids=str)
def test_initial_weights_are_those_of_one_rank(options: Options, world_size: int, mesh: str) -> None:
    one = _one_rank(options, (("steps", 0),))
    for seen in run_ranks(_run, world_size, options, mesh, {"steps": 0}):
        assert seen.weights.keys() == one.weights.keys()
        assert all(torch.equal(seen.weights[name], one.weights[name]) for name in one.weights)


# ---- refusals ------------------------------------------------------------------------------------------------------


class Small(nn.Module):
    def __init__(self, plan: Any, width: int = 12, classes: int = 10) -> None:
        super().__init__()
        self._plan = plan
        self.embed = nn.Embedding(classes, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, width), nn.Linear(width, 6)) for _ in range(2))
        self.conv, self.head = nn.Conv1d(6, 6, 1), nn.Linear(6, classes, bias=False)
        self.head.weight = self.embed.weight

    def tensor_parallel_plan(self) -> Any:
        return self._plan


@pytest.mark.parametrize(
    ("plan", "width", "message"),
    [
        (None, 12, "mesh axis tp=4: Small has no tensor-parallel plan; define Small.tensor_parallel_plan()"),
        ({}, 12, "Small has no tensor-parallel plan"),
        ({"blocks.*.2": "colwise"}, 12, r"'blocks.\*.2' names no module; blocks.0 has 0, 1"),
        ({"layers.*.0": "colwise"}, 12, r"'layers.\*.0' names no module; the task has embed, blocks, conv, head"),
        ({"*.*": "columns"}, 12, "has the style 'columns': use one of colwise, colwise_gather_output"),
        (
            {"blocks.0.0": "colwise", "*.*.0": "rowwise"},
            12,
            r"'blocks.0.0' and '\*.\*.0' both name blocks.0.0: keep one",
        ),
        ({"conv": "colwise"}, 12, "conv is a Conv1d, planned colwise: only nn.Linear and nn.Embedding can be cut"),
        (
            {"*.*.0": "colwise", "*.*.1": "rowwise"},
            14,
            "blocks.0.0 is planned colwise, and its out_features=14 is not a multiple of tp=4: use 16, or a tp that"
            r" divides it \(2, 7, 14\)",
        ),
        ({"*.*.1": "rowwise"}, 14, "blocks.0.1 is planned rowwise, and its in_features=14 is not a multiple of tp=4"),
        ({"embed": ColwiseParallel()}, 12, "embed is planned colwise, and its embedding_dim=6 is not a multiple"),
        (
            {"embed": "embedding_rowwise"},
            12,
            "embed.weight and head.weight are one weight, and the tensor-parallel plan cuts one of them by rows and the"
            " other not at all",
        ),
        ({"embed": "embedding_colwise", "head": "colwise_rep"}, 12, "one of them by columns and the other by rows"),
    ],
)
def test_plans_that_cannot_work(plan: Any, width: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_plan(Small(plan, width), 4)


def test_uneven_classes_are_fine() -> None:
    plan = {"embed": "embedding_rowwise", "head": "colwise_gather_output"}
    assert read_plan(Small(plan), 4).styles.keys() == {"embed", "head"}
    assert not read_plan(Small(plan), 4).splits_loss
    assert read_plan(Small({"embed": "embedding_rowwise", "head": "colwise_loss_parallel"}), 4).splits_loss
    assert all(read_plan(Small({"*.*.0": "colwise", "*.*.1": name}), 4) for name in ("rowwise", "rowwise_rep"))
    assert {"colwise", "rowwise", "sequence_parallel"} <= STYLES.keys()


class LeftSplit(Llama):
    """The head's logits are never put together."""

    def tensor_parallel_plan(self) -> dict[str, Any]:
        return {**super().tensor_parallel_plan(), "head": "colwise"}

    def loss(self, outputs: Tensor, batch: Tensor) -> Tensor:
        return F.cross_entropy(outputs.flatten(0, 1), batch[:, 1:].flatten() % outputs.shape[-1])


class WholeOnSplit(Llama):
    """A norm on a split sequence that the plan does not know."""

    def tensor_parallel_plan(self) -> dict[str, Any]:
        plan = {
            **super().tensor_parallel_plan(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        }
        return {name: style for name, style in plan.items() if name != "norm"}


class Uneven(Llama):
    def inputs(self, batch: Tensor) -> Tensor:
        return batch[:, :-2]

    def loss(self, outputs: Tensor, batch: Tensor) -> Tensor:
        return F.cross_entropy(outputs.flatten(0, 1), batch[:, 1:-1].flatten())


def _train(rank: int, world_size: int, kind: type[Llama], plan: str) -> None:
    Trainer(max_steps=2, global_batch_size=4, micro_batch_size=2, mesh="tp=2").fit(kind(variant(plan=plan)))


@pytest.mark.parametrize(
    ("kind", "plan", "message"),
    [
        (LeftSplit, "plain", "the loss differs over the ranks of mesh axis tp"),
        (WholeOnSplit, "sequence", "the gradient of norm.weight differs over the ranks of mesh axis tp"),
        (
            Uneven,
            "sequence",
            "the output of embed is split along dim 1, where the batch has 15, not a multiple of tp=2",
        ),
    ],
    ids=["left-split", "whole-on-split", "uneven"],
)
def test_plans_that_would_train_wrongly_end_in_the_first_step(kind: type[Llama], plan: str, message: str) -> None:
    with pytest.raises(RankError, match=message) as raised:
        run_ranks(_train, 2, kind, plan)
    assert "UsageError" in str(raised.value)


def test_heads_are_not_cut_through() -> None:
    task = ByteLM(num_heads=6, dim=96, num_layers=1)
    task.configure_model()
    assert read_plan(task, 3).splits_loss
    message = (
        r"blocks.0.num_heads=6 is not a multiple of tp=4: use 8, or a tp that divides it \(2, 3, 6\): a head stays"
    )
    with pytest.raises(UsageError, match=message):
        read_plan(task, 4)
