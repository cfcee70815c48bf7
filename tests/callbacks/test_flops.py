"""What a sample costs: counted by hand, by the trainer, and by all ranks as they multiply."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import TensorDataset
from torch.utils.flop_counter import flop_registry

from elastictrain import Callback, MeshConfig, Task, Trainer
from elastictrain.callback import RunInfo, StepInfo
from elastictrain.callbacks import ThroughputMonitor
from tests.helpers import logged, run_ranks
from tests.parallel.lm import DIM, LM, SEQ, VOCAB

pytestmark = pytest.mark.filterwarnings("ignore")


class Ends(Callback):
    """What a sample costs, as a callback is told."""

    def on_generation_start(self, info: RunInfo) -> None:
        self.info = info

    def on_generation_end(self, info: RunInfo) -> None:
        self.flops = self.info.flops_per_sample()


def flops_of(task: Any, **options: Any) -> float | None:
    ends = Ends()
    options = {"global_batch_size": 8, "micro_batch_size": 2, **options}
    Trainer(max_steps=1, callbacks=[ends], **options).fit(task)
    return ends.flops


class Chain(Task):
    """Products of matrices, of which the first needs no gradient of its input."""

    widths = (8, 32, 16, 4)

    def __init__(self) -> None:
        super().__init__()
        self.num_losses, self.num_steps = [], 0

    def configure_model(self) -> None:
        sizes = zip(self.widths, self.widths[1:], strict=False)
        self.net = nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in sizes))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        self.num_losses.append(outputs.sum())
        return outputs.square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.num_steps += 1
        return super().training_step(batch, batch_idx)

    def train_dataset(self) -> Any:
        return TensorDataset(torch.randn(16, 8))

    def inputs(self, batch: Any) -> Any:
        return batch[0]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def test_a_chain_of_products_is_counted_exactly_and_leaves_no_trace() -> None:
    task = Chain()
    by_hand = 6 * sum(a * b for a, b in zip(Chain.widths, Chain.widths[1:], strict=False)) - 2 * 8 * 32
    assert flops_of(task) == by_hand
    assert (task.num_steps, len(task.num_losses)) == (4, 4), "the task's own step runs as often as without"
    assert all(not value.is_meta for value in task.num_losses)


def test_a_transformer_is_counted_within_two_percent() -> None:
    layers = 3
    weights = layers * 12 * DIM * DIM + DIM * VOCAB
    by_hand = 6 * weights * SEQ + 12 * layers * DIM * SEQ**2
    found = flops_of(LM(num_layers=layers))
    assert found == pytest.approx(by_hand, rel=0.02)


def test_the_tasks_own_figure_wins() -> None:
    class Told(Chain):
        def flops_per_sample(self) -> float:
            return 12345.0

    assert flops_of(Told()) == 12345.0


def test_code_that_needs_values_is_not_counted(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        assert flops_of(LM(reads=True)) is None
    assert "define flops_per_sample()" in caplog.text


class OnlyStep(Chain):
    """No loss of its own: its step may do anything, so it is not run a second time."""

    loss = Task.loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.num_steps += 1
        return self(batch[0]).square().mean()


def test_a_training_step_is_never_run_to_be_counted() -> None:
    task = OnlyStep()
    assert flops_of(task) is None
    assert task.num_steps == 4


class Bank:
    """Remembers outputs, as losses do that compare a batch with earlier ones."""

    def __init__(self) -> None:
        self.pushed, self.kept = 0, torch.zeros(3, 4)

    def push(self, outputs: Tensor) -> Tensor:
        self.pushed += 1
        self.kept = torch.cat((self.kept[1:], outputs.detach()[:1]))
        return (outputs @ self.kept.T).square().mean()


class Remembers(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.bank, self.weights = Bank(), torch.ones(4)

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return self.bank.push(outputs * self.weights)


def test_what_a_loss_remembers_is_what_it_has_seen() -> None:
    task = Remembers()
    assert flops_of(task) == 6 * (8 * 32 + 32 * 16 + 16 * 4) - 2 * 8 * 32 + 2 * 2 * 4 * 3
    assert task.bank.pushed == 4 and not task.bank.kept.is_meta and task.bank.kept.abs().sum() > 0


class Draws(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.noise = torch.Generator().manual_seed(3)

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return (outputs * torch.rand(4, generator=self.noise)).square().mean()


class Sparse(Chain):
    def configure_model(self) -> None:
        super().configure_model()
        self.register_buffer("graph", torch.eye(4).to_sparse_csr(), persistent=False)


@pytest.mark.parametrize("kind", [Draws, Sparse])
def test_what_cannot_be_copied_trains_and_is_not_counted(kind: type[Chain], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        task = kind()
        assert flops_of(task) is None
    assert "define flops_per_sample()" in caplog.text
    if isinstance(task, Draws):
        once = torch.Generator().manual_seed(3)
        torch.rand(16, generator=once)
        assert torch.equal(task.noise.get_state(), once.get_state())


def test_where_nobody_asks_nothing_is_copied(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        Trainer(max_steps=1, callbacks=[ThroughputMonitor(enabled=False)], global_batch_size=8, micro_batch_size=2).fit(
            Sparse()
        )
    assert "flops_per_sample" not in caplog.text


@pytest.mark.slow
def test_a_model_of_transformers_is_counted() -> None:
    transformers = pytest.importorskip("transformers")

    class Causal(Chain):
        def configure_model(self) -> None:
            self.net = transformers.AutoModelForCausalLM.from_config(
                transformers.LlamaConfig(
                    vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
                )
            )

        def train_dataset(self) -> Any:
            return TensorDataset(torch.randint(50, (16, 8)))

        def loss(self, outputs: Any, batch: Any) -> Tensor:
            return F.cross_entropy(outputs.logits.flatten(0, 1), batch[0].flatten())

    weights = 2 * (4 * 32 * 32 + 3 * 32 * 64) + 32 * 50
    assert flops_of(Causal()) == pytest.approx(6 * weights * 8 + 12 * 2 * 32 * 8**2, rel=0.02)


# ---- in every layout -----------------------------------------------------------------------------------------------


class LocalFlops(TorchDispatchMode):
    """What this rank multiplies itself, also as its part of distributed tensors."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(one, DTensor) for one in types):
            return NotImplemented  # and then it is asked again, about the local parts
        out = func(*args, **(kwargs or {}))
        if (count := flop_registry.get(func._overloadpacket)) is not None:
            self.total += count(*args, **(kwargs or {}), out_val=out)
        return out


class Multiplied(Callback):
    """FLOPs of the second step, as they are done."""

    def __init__(self) -> None:
        self.flops = LocalFlops()

    def on_step_end(self, info: StepInfo) -> None:
        if info.step == 1:
            self.flops.__enter__()
        if info.step == 2:
            self.flops.__exit__(None, None, None)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh", [MeshConfig(tp=2), MeshConfig(pp=2), MeshConfig(dp_shard=2), MeshConfig(dp_replicate=2)]
)
def test_every_layout_reports_the_whole_models_flops(mesh: MeshConfig, tmp_path: Path) -> None:
    """And that is what all ranks multiply together; MFU is its share of what both devices could do."""
    alone = flops_of(LM(num_layers=2))
    assert alone is not None

    def train(rank: int, world_size: int) -> int:
        counted, monitor = Multiplied(), ThroughputMonitor(peak_tflops=0.5)
        options: dict[str, Any] = {"max_steps": 4, "global_batch_size": 8, "micro_batch_size": 2, "log_every": 2}
        Trainer(run_dir=str(tmp_path), mesh=mesh, callbacks=[monitor, counted], **options).fit(LM(num_layers=2))
        return counted.flops.total

    multiplied = run_ranks(train, 2)
    attention = 12 * 2 * DIM * SEQ**2  # which torch does not count where it computes it on a CPU
    assert min(multiplied) > 0 and sum(multiplied) / 8 == pytest.approx(alone - attention, rel=0.02)
    samples, tflops = (logged(tmp_path, f"throughput/{name}")[4] for name in ("samples_per_second", "tflops"))
    assert tflops * 1e12 / samples == pytest.approx(alone)
    assert logged(tmp_path, "throughput/tflops_per_device")[4] == pytest.approx(tflops / 2)
    assert logged(tmp_path, "throughput/mfu")[4] == pytest.approx(tflops / (2 * 0.5))
    assert math.isfinite(logged(tmp_path, "time/communication")[4])


def test_the_count_and_attention() -> None:
    """Attention counts as two products forward and four backward, whatever its mask and kernel."""

    class Attends(Chain):
        def configure_model(self) -> None:
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            q = (self.scale * x).reshape(-1, 1, 4, 2)
            return F.scaled_dot_product_attention(q, q, q, is_causal=True)

    assert flops_of(Attends()) == 6 * 2 * 4 * 4 * 2
