"""A small Llama as a task, with a tensor-parallel plan in every variant, and what a few steps of it look like."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)
from torch.utils.data import Dataset

from elastictrain import Callback, CheckpointConfig, Task, Trainer
from elastictrain.callback import StepInfo

SEQ, DIM, HEADS = 16, 32, 4


@dataclass(frozen=True)
class Options:
    vocab: int = 64
    num_layers: int = 2
    tied: bool = False
    frozen: tuple[str, ...] = ()
    dropout: float = 0.0
    plan: str = "sequence"  # sequence, loss (both split the sequence); plain, split (the logits alone)
    optimizer: str = "sgd"
    units: bool = False  # the embedding and the head are units of their own
    defer: bool = True


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # without a bias for keys, whose gradient is nothing but rounding, which Adam blows up
        self.wq, self.wk, self.wv = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM, bias=False), nn.Linear(DIM, DIM)
        self.wo = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, DIM // HEADS)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.wo(mixed.transpose(1, 2).flatten(-2))
        return out


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.n1, self.n2 = nn.RMSNorm(DIM), nn.LayerNorm(DIM)
        self.attention = Attention()
        self.up, self.down = nn.Linear(DIM, 2 * DIM, bias=False), nn.Linear(2 * DIM, DIM, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.n1(x)))
        return x + self.dropout(self.down(F.silu(self.up(self.n2(x)))))


class Tokens(Dataset[Tensor]):
    def __init__(self, vocab: int) -> None:
        self.vocab = vocab

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> Tensor:
        return torch.randint(self.vocab, (SEQ + 1,), generator=torch.Generator().manual_seed(index))


class Llama(Task):
    batch_size = 8

    def __init__(self, options: Options | None = None) -> None:
        super().__init__()
        self.options = options or Options()
        self.norms: list[float] = []
        if not self.options.defer:
            torch.manual_seed(int(torch.randint(1 << 30, ())))  # other ranks' own weights must not count
            self.build()

    def configure_model(self) -> None:
        if self.options.defer and not hasattr(self, "embed"):
            self.build()

    def build(self) -> None:
        o = self.options
        self.embed = nn.Embedding(o.vocab, DIM)
        self.layers = nn.ModuleList(Block(o.dropout) for _ in range(o.num_layers))
        self.norm, self.head = nn.RMSNorm(DIM), nn.Linear(DIM, o.vocab, bias=False)
        if o.tied:
            self.head.weight = self.embed.weight
        for name, parameter in self.named_parameters():
            nn.init.normal_(parameter, std=0.2) if parameter.ndim > 1 else nn.init.normal_(parameter, 1.0, 0.1)
            if any(part in name for part in o.frozen):
                parameter.requires_grad_(False)

    def pipeline_units(self) -> list[str]:
        blocks = [f"layers.{i}" for i in range(self.options.num_layers)]
        return ["embed", *blocks, "norm", "head"] if self.options.units else blocks

    def tensor_parallel_plan(self) -> dict[str, Any]:
        if self.options.plan in ("plain", "split"):
            return {
                "embed": "embedding_rowwise",
                "layers.*.attention.w[qkv]": "colwise",
                "layers.*.attention.wo": "rowwise",
                "layers.*.up": "colwise",
                "layers.*.down": "rowwise",
                "head": "colwise_gather_output" if self.options.plan == "plain" else "colwise_loss_parallel",
            }
        split = self.options.plan == "loss"
        return {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "layers.*.n[12]": SequenceParallel(),
            "layers.*.attention": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
            "layers.*.attention.w[qkv]": "colwise",
            "layers.*.attention.wo": RowwiseParallel(output_layouts=Shard(1)),
            "layers.*.up": ColwiseParallel(input_layouts=Shard(1)),
            "layers.*.down": RowwiseParallel(output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(
                input_layouts=Shard(1),
                output_layouts=Shard(-1) if split else Replicate(),
                use_local_output=not split,
            ),
        }

    def inputs(self, batch: Tensor) -> Tensor:
        return batch[:, :-1]

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def loss(self, outputs: Tensor, batch: Tensor) -> Tensor:
        return F.cross_entropy(outputs.flatten(0, 1), batch[:, 1:].flatten())

    def train_dataset(self) -> Tokens:
        return Tokens(self.options.vocab)

    def val_dataset(self) -> Tokens:
        return Tokens(self.options.vocab)

    def configure_optimizers(self) -> Any:
        matrices = [p for p in self.parameters() if p.ndim > 1 and p.requires_grad]
        gains = [p for p in self.parameters() if p.ndim <= 1 and p.requires_grad]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": gains, "weight_decay": 0.0}]
        if self.options.optimizer == "adamw":
            return torch.optim.AdamW(groups, lr=1e-2)
        return torch.optim.SGD(groups, lr=0.05, momentum=0.9)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """The norm of all gradients, in a way that has nothing to do with how the trainer computes it."""
        total = torch.zeros((), dtype=torch.float64)
        for parameter in self.parameters():
            if parameter.grad is not None:
                assert isinstance(parameter.grad, DTensor) == isinstance(parameter, DTensor)
                total += whole(parameter.grad).double().square().sum()
        self.norms.append(total.sqrt().item())


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class Losses(Callback):
    def __init__(self) -> None:
        self.values: dict[int, float] = {}

    def on_step_end(self, info: StepInfo) -> None:
        assert info.metrics is not None
        self.values[info.step] = info.metrics["train/loss"]


@dataclass(frozen=True)
class Seen:
    losses: dict[int, float]
    norms: list[float]
    weights: dict[str, Tensor]  # in full, after the last step
    state: dict[str, Tensor]  # of the optimizer, in full
    placements: dict[str, str]
    trainable: list[str]


def steps_of(options: Options, mesh: str, steps: int = 5, run_dir: Path | None = None, **more: Any) -> Seen:
    """Train on this rank."""
    task, losses = Llama(options), Losses()
    callbacks = [losses, *more.pop("callbacks", [])]
    trainer = Trainer(
        run_dir=None if run_dir is None else str(run_dir),
        max_steps=steps,
        mesh=mesh,
        callbacks=callbacks,
        checkpoint=CheckpointConfig(every_seconds=None, keep_last=None),
        **{"global_batch_size": 8, "micro_batch_size": 2, "log_every": 1, **more},
    )
    trainer.fit(task)
    names = {p: n for n, p in task.named_parameters()}
    optimizer = task.trainer.optimizers[0]
    state = {
        f"{names[p]}.{key}": whole(value).clone()
        for p, values in optimizer.state.items()
        for key, value in values.items()
        if isinstance(value, Tensor)
    }
    return Seen(
        losses.values,
        task.norms,
        {n: whole(p).detach().clone() for n, p in task.named_parameters()},
        state,
        {n: str(p.placements) if isinstance(p, DTensor) else "whole" for n, p in task.named_parameters()},
        [n for n, p in task.named_parameters() if p.requires_grad],
    )


def variant(**changes: Any) -> Options:
    return dataclasses.replace(Options(), **changes)
