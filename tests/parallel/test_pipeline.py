"""A model cut into stages trains as it does whole: every schedule, kinds of models, data parallelism around it."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from elastictrain.config import PP_SCHEDULES, MeshShape
from elastictrain.errors import UsageError
from elastictrain.parallel.mesh import join, leave, make_mesh
from elastictrain.parallel.pipeline import Job, Pipeline
from elastictrain.parallel.schedules import check_microbatches, owners
from elastictrain.parallel.stages import shapes_key
from elastictrain.parallel.units import cut_stages
from elastictrain.step_plan import Precision
from tests.helpers import RankError, apart, run_ranks
from tests.parallel.piped import MODELS, train

pytestmark = pytest.mark.filterwarnings("ignore")

whole = functools.cache(lambda model, num_slots: run_ranks(train, 1, model, None, "", num_slots)[0])


def check(model: str, shape: MeshShape, schedule: str, num_slots: int) -> None:
    losses, norms, state, outputs = whole(model, num_slots)
    held: set[str] = set()
    for theirs in run_ranks(train, shape.world_size, model, shape, schedule, num_slots):
        assert max(apart(a, b) for a, b in zip(theirs[0], losses, strict=True)) <= 1e-6
        assert max(apart(a, b) for a, b in zip(theirs[1], norms, strict=True)) <= 1e-6
        for name, tensor in theirs[2].items():
            torch.testing.assert_close(tensor, state[name], rtol=1e-5, atol=1e-6, msg=name)
        torch.testing.assert_close(theirs[3], outputs, rtol=1e-4, atol=1e-5)
        held |= theirs[2].keys()
    assert held == state.keys()


slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("pp", "schedule"),
    [
        pytest.param(pp, schedule, marks=[] if pp == 2 and schedule in ("1F1B", "ZBV") else [slow])
        for pp in (2, 3, 4)
        for schedule in PP_SCHEDULES
    ],
)
def test_every_schedule_changes_nothing(pp: int, schedule: str) -> None:
    check("transformer", MeshShape(pp=pp), schedule, 2 * pp)


@pytest.mark.parametrize("schedule", ["1F1B", *(pytest.param(s, marks=slow) for s in ("Interleaved1F1B", "ZBV"))])
@pytest.mark.parametrize("model", [m if m in ("tied", "cnn") else pytest.param(m, marks=slow) for m in MODELS])
def test_every_kind_of_model(model: str, schedule: str) -> None:
    check(model, MeshShape(pp=2), schedule, 8)


@slow
@pytest.mark.parametrize(
    ("model", "shape", "schedule", "num_slots"),
    [
        ("dropout", MeshShape(pp=2, dp_shard=2), "1F1B", 9),
        ("tied", MeshShape(pp=2, dp_shard=2), "ZBV", 9),
        ("loose", MeshShape(pp=2, dp_shard=2), "InterleavedZeroBubble", 9),
        ("cnn", MeshShape(pp=2, dp_shard=2), "Interleaved1F1B", 8),
        ("cnn", MeshShape(pp=2, dp_replicate=2), "1F1B", 9),
        ("frozen", MeshShape(pp=2, dp_shard=2), "DualPipeV", 9),
        ("dropout", MeshShape(pp=2, dp_replicate=2, dp_shard=2), "1F1B", 9),
        ("transformer", MeshShape(pp=2, dp_shard=2), "1F1B", 1),  # a data-parallel rank without a slot
        ("transformer", MeshShape(pp=2, dp_shard=2), "Interleaved1F1B", 3),
        ("transformer", MeshShape(pp=3), "DualPipeV", 2),  # fewer than the schedule can: another one runs its stages
        ("transformer", MeshShape(pp=2), "Interleaved1F1B", 5),
    ],
    ids=str,
)
def test_with_data_parallelism(model: str, shape: MeshShape, schedule: str, num_slots: int) -> None:
    check(model, shape, schedule, num_slots)


# ---- what cannot be cut --------------------------------------------------------------------------------------------


class Row(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.head = nn.Linear(4, 4)


class Skips(Row):
    def forward(self, x: Tensor) -> Tensor:
        first = x = self.layers[0](x)
        for layer in self.layers[1:]:
            x = layer(x)
        return self.head(x + first)


class Repeats(Row):
    def forward(self, x: Tensor) -> Tensor:
        for layer in (*self.layers, *self.layers):
            x = layer(x)
        return self.head(x)


class Reaches(Row):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x) @ self.layers[0].weight


class LeavesOut(Row):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if layer is not self.layers[1]:
                x = layer(x)
        return self.head(x)


class Hands(Row):
    """Something other than tensors from one stage to the next."""

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

    def configure(self) -> Row:
        self.layers[1].forward = lambda x: object()  # type: ignore[method-assign]
        return self


def _refused(rank: int, world_size: int, model: type[Row]) -> str:
    net = model()
    if isinstance(net, Hands):
        net.configure()
    ranks = join(rank=rank, world_size=world_size, local_rank=rank)
    at = owners("1F1B", pp=2)
    stages = cut_stages(net, num_stages=2, owners=at, starts=["layers.2"])
    pipeline = Pipeline(net, stages, make_mesh(ranks, MeshShape(pp=2)), schedule="1F1B")
    pipeline.place(lambda part: None, precision=Precision())
    x = torch.randn(2, 4)
    jobs = [Job(slot, (x,), shapes_key(x), torch.get_rng_state()) for slot in range(2)]
    try:
        pipeline.train(jobs, lambda outputs, number: outputs.sum())
    except (UsageError, AttributeError) as error:
        leave(ranks)
        return str(error)
    return "trained"


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Skips, "depends on a unit before layers.1, whose output forward.. uses again further on"),
        (Repeats, r"calls layers.0 after layers.3: a pipeline needs each unit called once"),
        (Reaches, r"layers.0.weight is asked for on a pipeline stage that does not have it"),
        (LeavesOut, r"does not call layers.1, and the model is cut behind it"),
        (Hands, r"layers.1 returns a object, and the model is cut behind it"),
    ],
)
def test_a_model_that_would_be_wrong_is_refused_on_every_rank(model: type[Row], message: str) -> None:
    import re

    for text in run_ranks(_refused, 2, model):
        assert re.search(message, text), text


def _differing(rank: int, world_size: int) -> None:
    net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    ranks = join(rank=rank, world_size=world_size, local_rank=rank)
    at = owners("GPipe", pp=2)
    pipeline = Pipeline(
        net, cut_stages(net, num_stages=2, owners=at), make_mesh(ranks, MeshShape(pp=2)), schedule="GPipe"
    )
    pipeline.place(lambda part: None, precision=Precision())
    dist.barrier()  # what follows needs no other rank: one that has ended would take its store away
    batches = [torch.randn(size, 4) for size in (2, 3, 2)]
    jobs = [Job(i, (x,), shapes_key(x), torch.get_rng_state()) for i, x in enumerate(batches)]
    with pytest.raises(UsageError, match=r"slots of one global batch differ in shape \(\[2, 4\] and \[3, 4\]\)"):
        pipeline.train(jobs, lambda outputs, number: outputs.sum())
    leave(ranks)


def test_slots_of_different_shapes_are_refused() -> None:
    run_ranks(_differing, 2)


def _failing(rank: int, world_size: int) -> None:
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            if not self.training:
                raise RuntimeError("no evaluation today")
            return x

    net = Fails()
    ranks = join(rank=rank, world_size=world_size, local_rank=rank)
    at = owners("1F1B", pp=2)
    pipeline = Pipeline(
        net, cut_stages(net, num_stages=2, owners=at), make_mesh(ranks, MeshShape(pp=2)), schedule="1F1B"
    )
    pipeline.place(lambda part: None, precision=Precision())
    net.eval()
    with torch.no_grad():
        net(torch.randn(2, 4))


def test_an_error_in_one_stage_reaches_every_rank() -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(_failing, 2, timeout=20)
    assert "UsageError: pipeline stage 1: no evaluation today" in str(caught.value)
    assert "RuntimeError: no evaluation today" in str(caught.value)
    assert "still running" not in str(caught.value)


# ---- schedules -----------------------------------------------------------------------------------------------------


def test_who_runs_which_stage() -> None:
    assert owners("1F1B", pp=3) == (0, 1, 2)
    assert owners("Interleaved1F1B", pp=2) == (0, 1, 0, 1)
    assert owners("LoopedBFS", pp=2, num_cut_points=5) == (0, 1, 0, 1, 0, 1)
    assert owners("ZBV", pp=3) == (0, 1, 2, 2, 1, 0)
    for schedule, points in (("1F1B", 2), ("ZBV", 2), ("Interleaved1F1B", 2)):
        with pytest.raises(
            UsageError, match=rf"pp_split names {points} cut points, which make 3 stages, and {schedule}"
        ):
            owners(schedule, pp=2, num_cut_points=points)


def test_too_few_microbatches() -> None:
    check_microbatches("1F1B", num_slots=4, num_stages=4, pp=4, dp=1)
    with pytest.raises(UsageError, match="8 slots gives a data-parallel rank 2 of them, and a pipeline of 4 stages"):
        check_microbatches("1F1B", num_slots=8, num_stages=4, pp=4, dp=4)
    with pytest.raises(UsageError, match="multiple of its 2 rounds, and a data-parallel rank has 5"):
        check_microbatches("Interleaved1F1B", num_slots=5, num_stages=4, pp=2, dp=1)
    with pytest.raises(UsageError, match="needs 8 to be busy"):
        check_microbatches("DualPipeV", num_slots=7, num_stages=8, pp=4, dp=1)
