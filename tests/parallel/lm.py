"""A small language model as a task, for tests of the planner: what it weighs in every kind of memory can be counted."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from elastictrain import Task
from elastictrain.parallel import attention

DIM, SEQ, VOCAB = 32, 64, 96


class Block(nn.Module):
    def __init__(self, heads: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.num_heads, self.dropout = heads, dropout
        self.norm, self.mlp_norm = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = attention(q, k, v, dropout_p=self.dropout, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + F.dropout(self.down(F.gelu(self.up(self.mlp_norm(x)))), self.dropout, self.training)


class LM(Task):
    batch_size = 8

    def __init__(self, *, num_layers: int = 3, differ: bool = False, reads: bool = False) -> None:
        super().__init__()
        self.reads = reads
        self.seen: list[int] = []
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(num_layers))
        if differ:  # equal blocks that do not look so
            for i, block in enumerate(self.blocks):
                block.index = i
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def pipeline_units(self) -> list[str]:
        return [f"blocks.{i}" for i in range(len(self.blocks))]

    def tensor_parallel_plan(self) -> dict[str, Any]:
        return {
            "embed": "embedding_rowwise",
            "blocks.*.qkv": "colwise",
            "blocks.*.out": "rowwise",
            "blocks.*.up": "colwise",
            "blocks.*.down": "rowwise",
            "head": "colwise_gather_output",
        }

    def context_parallel_plan(self) -> dict[int, int]:
        return {0: 1, 1: 1}

    def collate_fn(self, samples: list[Tensor]) -> tuple[Tensor, Tensor]:
        batch = torch.stack(samples)
        return batch[:, :-1].clone(), batch[:, 1:].clone()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        if self.reads and x.sum().item() > 0:
            x = -x
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def loss(self, outputs: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(outputs.flatten(0, 1), batch[1].flatten())

    def train_dataset(self) -> Any:
        return torch.randint(VOCAB, (20, SEQ + 1), generator=torch.Generator().manual_seed(0))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())
