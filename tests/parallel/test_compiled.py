"""Compiled blocks: eager code's numbers, or a refusal before anything is trained with others."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from elastictrain import MeshConfig, Trainer, UsageError
from elastictrain.callbacks import ActivationCheckpointing, Compile, GradientClipping, MixedPrecision
from elastictrain.comparing import worst
from elastictrain.parallel.build import _cut
from elastictrain.parallel.compiled import missing_to_compile
from elastictrain.step_plan import Compilation, StepPlan
from tests.helpers import apart, logged, run_ranks
from tests.parallel.llama import Options, Seen, steps_of
from tests.trainer.tasks import Recorded, train

needs_compiler = pytest.mark.skipif(
    missing_to_compile(Compilation(), "cpu") is not None, reason=str(missing_to_compile(Compilation(), "cpu"))
)


class Norms(nn.Module):
    """Everything that two more passes could leave behind: dropout, running statistics."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear, self.dropout = nn.BatchNorm1d(width), nn.Linear(width, width), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.linear(self.norm(x)).relu())


class Twice(Recorded):
    """May compute a slot again."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(self(batch[0]), batch)


class Counted(Recorded):
    """Counts how often it computes anything."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0
        self.error = torchmetrics.MeanMetric()

    def configure_model(self) -> None:
        super().configure_model()
        self.blocks = nn.ModuleList(Norms(16) for _ in range(3))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.num_calls += 1
        batch = [*batch[:2], batch.pop()]  # takes things out of its batch
        loss = self.loss(self(batch[0]), batch)
        self.error(loss.detach())
        self.log("error", self.error, on_step=False, on_epoch=True)
        return loss


def _fit(rank: int, world_size: int, run_dir: Path, mesh: str, callbacks: list[Any]) -> Any:
    task = Counted()
    train(task, run_dir, mesh, 3, callbacks=callbacks, val_every=None)
    assert not any("forward" in module.__dict__ for module in task.modules())
    state = {
        name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        for name, tensor in task.state_dict().items()
    }
    return {name: tensor.detach().clone() for name, tensor in state.items()}, task.num_calls


def _same(tmp_path: Path, world_size: int, mesh: str, callbacks: list[Any]) -> None:
    eager = run_ranks(_fit, world_size, tmp_path / "eager", mesh, [c for c in callbacks if not isinstance(c, Compile)])
    compiled = run_ranks(_fit, world_size, tmp_path / "compiled", mesh, callbacks, timeout=500.0)
    losses = [logged(tmp_path / name, "train/loss") for name in ("eager", "compiled")]
    assert losses[0] and losses[0].keys() == losses[1].keys()
    assert max(apart(losses[0][step], losses[1][step]) for step in losses[0]) <= 1e-6
    errors = [logged(tmp_path / name, "error") for name in ("eager", "compiled")]
    assert errors[0] == pytest.approx(errors[1], rel=1e-6, abs=1e-6)
    for (expected, calls), (found, more_calls) in zip(eager, compiled, strict=True):
        assert more_calls == calls + 2, "the first slot once compiled and once eager"
        assert list(found) == list(expected)
        for name, tensor in found.items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize(("world_size", "mesh"), [(1, "auto"), pytest.param(2, "dp_shard=2", marks=pytest.mark.slow)])
def test_it_changes_nothing(tmp_path: Path, world_size: int, mesh: str) -> None:
    _same(tmp_path, world_size, mesh, [Compile(backend="aot_eager", fullgraph=True)])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "mesh", "recompute"),
    [
        (2, "dp_replicate=2", None),
        (3, "dp_shard=3", ActivationCheckpointing()),
        (4, "dp_replicate=2,dp_shard=2", ActivationCheckpointing("selective")),
    ],
)
def test_on_every_layout_with_recomputation(tmp_path: Path, world_size: int, mesh: str, recompute: Any) -> None:
    _same(tmp_path, world_size, mesh, [Compile(backend="aot_eager"), *([recompute] if recompute else [])])


@pytest.mark.slow
@pytest.mark.timeout(600)
@needs_compiler
@pytest.mark.parametrize("recompute", [[], [ActivationCheckpointing()]], ids=["kept", "recomputed"])
def test_with_the_real_compiler(tmp_path: Path, recompute: list[Any]) -> None:
    # A recomputed BatchNorm cannot be traced as a whole: its calls are counted for the running statistics of all ranks.
    compiled = Compile(fullgraph=not recompute)
    _same(tmp_path, 2, "dp_shard=2", [compiled, GradientClipping(norm=1.0), *recompute])


def test_equal_blocks_are_compiled_once() -> None:
    num_compiled = 0

    def counts(graph: Any, inputs: Any) -> Any:
        nonlocal num_compiled
        num_compiled += 1
        return graph.forward

    with _backend("counts", counts):
        train(Twice(), None, "auto", 2, callbacks=[Compile(backend="counts")], val_every=5)
    assert num_compiled == 3, "in training, in validation, and for the last batch of it, which is smaller"


class _backend:
    """A backend of torch.compile by name, for a test."""

    def __init__(self, name: str, function: Any) -> None:
        self.name, self.function = name, function

    def __enter__(self) -> None:
        from torch._dynamo.backends.registry import _COMPILER_FNS, register_backend

        torch._dynamo.reset()
        _COMPILER_FNS.pop(self.name, None)
        register_backend(compiler_fn=self.function, name=self.name)

    def __exit__(self, *exc: object) -> None:
        torch._dynamo.reset()


def _forgets(graph: Any, inputs: Any) -> Any:
    """A compiler that loses a part of the gradient, and nothing of the result."""

    def run(*args: Any) -> Any:
        return tuple(out * 0.5 + (out * 0.5).detach() for out in graph.forward(*args))

    return run


def _refused(rank: int, world_size: int, mesh: str, callbacks: list[Any]) -> str:
    with _backend("forgets", _forgets), pytest.raises(UsageError) as caught:
        train(Twice(), None, mesh, 1, callbacks=[Compile(backend="forgets"), *callbacks], val_every=None)
    return str(caught.value)


@pytest.mark.parametrize(("world_size", "mesh"), [(1, "auto"), (2, "dp_shard=2")])
@pytest.mark.parametrize("callbacks", [[], [MixedPrecision("bf16")]], ids=["fp32", "bf16"])
def test_a_wrong_gradient_is_refused_on_every_rank(world_size: int, mesh: str, callbacks: list[Any]) -> None:
    messages = set(run_ranks(_refused, world_size, mesh, callbacks))
    (message,) = messages
    assert message.startswith("Compile: compiled blocks and eager code disagree on gradients, by ")
    assert re.search(r"by 7\d\.\d% on (first|blocks\.0)\.", message), "halved in each of two blocks"
    assert "\n" not in message


def test_what_counts_as_a_difference() -> None:
    eager = {"a": torch.full((4,), 1.0), "b": torch.tensor([1e-9, 0.0])}
    assert worst(eager, eager, tolerance=1e-3) is None
    assert worst({**eager, "b": torch.tensor([0.0, 1e-9])}, eager, tolerance=1e-3) is None, "rounding beside a"
    assert worst({**eager, "a": torch.full((4,), 1.0005)}, eager, tolerance=1e-3) is None
    assert worst({**eager, "a": torch.full((4,), 1.01)}, eager, tolerance=1e-3) == ("a", pytest.approx(0.01, rel=1e-3))
    assert worst({**eager, "b": torch.tensor([0.1, 0.0])}, eager, tolerance=1e-3) == ("b", pytest.approx(1e8))
    assert worst({"a": eager["a"]}, eager, tolerance=1e-3) == ("b", 1.0)
    nan = {"a": torch.full((4,), float("nan")), "b": eager["b"]}
    assert worst(nan, eager, tolerance=1e-3) is not None
    assert worst(nan, nan, tolerance=1e-3) is None, "eager code overflows as well"
    assert worst({}, {}, tolerance=1e-3) is None


def test_without_a_compiler_it_says_so_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -O2")
    trainer = Trainer(run_dir=str(tmp_path / "run"), max_steps=1, callbacks=[Compile()])
    with pytest.raises(UsageError, match=r"^Compile: there is no compiler 'no-such-compiler': install g\+\+") as caught:
        trainer.fit(Recorded())
    assert "\n" not in str(caught.value) and not (tmp_path / "run").exists()
    assert missing_to_compile(Compilation(backend="aot_eager"), "cpu") is None


def test_backends_are_known() -> None:
    with pytest.raises(UsageError, match=r"Compile\(backend='inducter'\) is not known: use one of .*inductor"):
        Compile(backend="inducter")


def test_a_model_without_blocks() -> None:
    class Flat(Recorded):
        def configure_model(self) -> None:
            self.first, self.between, self.last = nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)
            self.blocks = nn.ModuleList()

    with pytest.raises(UsageError, match="Compile: Flat has no run of equal blocks; name them in pipeline_units"):
        train(Flat(), None, "auto", 1, callbacks=[Compile(backend="eager")])


def test_manual_optimisation_is_not_compared() -> None:
    task = Twice()
    task.automatic_optimization = False
    with pytest.raises(UsageError, match="Compile: Twice has manual optimisation, whose compiled gradients nobody"):
        train(task, None, "auto", 1, callbacks=[Compile(backend="eager")])


def _llama(rank: int, world_size: int, mesh: str, callbacks: list[Any]) -> Seen:
    options = Options() if world_size > 1 else Options(plan="plain", units=False)
    return steps_of(options, mesh, steps=2, callbacks=callbacks)


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "mesh"), [(2, "tp=2"), (4, "dp_shard=2,tp=2")])
def test_with_tensor_parallelism(world_size: int, mesh: str) -> None:
    """An embedding that is still being summed over ranks enters the first compiled block."""
    (eager,) = run_ranks(_llama, 1, "auto", [])
    for seen in run_ranks(_llama, world_size, mesh, [Compile(backend="aot_eager")], timeout=150.0):
        assert seen.losses == pytest.approx(eager.losses, rel=1e-6, abs=1e-6)
        assert seen.norms == pytest.approx(eager.norms, rel=1e-6, abs=1e-6)
        for name, tensor in eager.weights.items():
            torch.testing.assert_close(seen.weights[name], tensor, rtol=1e-4, atol=2e-5, msg=name)


def _refused_with_tensor_parallelism(rank: int, world_size: int) -> str:
    with pytest.raises(UsageError) as caught:
        steps_of(Options(), "tp=2", steps=1, callbacks=[Compile(backend="eager"), ActivationCheckpointing()])
    return str(caught.value)


def test_recomputed_and_compiled_under_tensor_parallelism() -> None:
    for message in run_ranks(_refused_with_tensor_parallelism, 2):
        assert message.startswith("mesh axis tp=2 with Compile and ActivationCheckpointing") and "\n" not in message


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [[], [ActivationCheckpointing()]], ids=["kept", "recomputed"])
def test_in_a_pipeline(recompute: list[Any]) -> None:
    (eager,) = run_ranks(_llama, 1, "auto", [])
    stages = run_ranks(_llama, 2, "pp=2", [Compile(backend="aot_eager"), *recompute], timeout=150.0)
    for seen in stages:
        assert seen.losses == pytest.approx(eager.losses, rel=1e-6, abs=1e-6)
    norms = [math.hypot(*both) for both in zip(*(seen.norms for seen in stages), strict=True)]
    assert norms == pytest.approx(eager.norms, rel=1e-6, abs=1e-6)


def test_compiled_where_a_backward_pass_comes_in_two_halves() -> None:
    for schedule in ("InterleavedZeroBubble", "ZBV", "DualPipeV"):
        with pytest.raises(UsageError, match=f"^Compile with pp_schedule {schedule}: ") as caught:
            _cut(nn.Module(), MeshConfig(pp=2, pp_schedule=schedule), 2, StepPlan(compilation=Compilation()))
        assert "\n" not in str(caught.value)
