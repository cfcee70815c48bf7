"""Two published models as plain modules, to be planned and not to be trained here: Llama 3 405B and BLOOM 176B.

    elastictrain plan examples/published_models.py:Llama3_405B --nnodes 2048 --nproc-per-node 8 --device-memory 80GiB

Shapes are those of the papers (Grattafiori et al. 2024, arXiv:2407.21783; BigScience 2022, arXiv:2211.05100). Nobody
makes their weights: ``plan`` counts shapes. With smaller arguments they are tasks like any other.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel
from torch.utils.data import Dataset

from elastictrain import Task


class SameTokens(Dataset[Tensor]):
    """Samples of the right shape, int64 of (seq_len + 1,)."""

    def __init__(self, seq_len: int, *, vocab_size: int) -> None:
        self.seq_len, self.vocab_size = seq_len, vocab_size

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> Tensor:
        return torch.arange(index, index + self.seq_len + 1) % self.vocab_size


class CausalLM(Task):
    """What both have in common: embedding, blocks, norm, head, and how they are cut.

    Tensor parallelism is torch's version of Megatron's (Korthikanti et al. 2022, arXiv:2205.05198): attention heads and
    the MLP's hidden layer are shared out, and between them the sequence is.
    """

    embed: nn.Embedding
    blocks: nn.ModuleList
    norm: nn.Module
    head: nn.Linear

    columns: tuple[str, ...]  # layers within a block that are cut by columns
    rows: tuple[str, ...]
    seq_len: int

    def pipeline_units(self) -> list[str]:
        return [f"blocks.{i}" for i in range(len(self.blocks))]

    def tensor_parallel_plan(self) -> dict[str, Any]:
        whole = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
        return {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "blocks.*.attention_norm": SequenceParallel(),
            "blocks.*.mlp_norm": SequenceParallel(),
            "blocks.*.attention": whole,
            "blocks.*.mlp": whole,
            **{f"blocks.*.{name}": ColwiseParallel() for name in self.columns},
            **{f"blocks.*.{name}": RowwiseParallel(output_layouts=Shard(1)) for name in self.rows},
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
        }

    def inputs(self, batch: Tensor) -> Tensor:
        return batch[:, :-1]

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def loss(self, outputs: Tensor, batch: Tensor) -> Tensor:
        return F.cross_entropy(outputs.flatten(0, 1), batch[:, 1:].flatten())

    def train_dataset(self) -> SameTokens:
        return SameTokens(self.seq_len, vocab_size=self.embed.num_embeddings)

    def tokens_per_sample(self) -> int:
        return self.seq_len

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4, betas=(0.9, 0.95))


# ---- Llama 3 --------------------------------------------------------------------------------------------------------


def rotate(x: Tensor, *, base: float) -> Tensor:
    """Rotary positions on x of shape (batch, heads, seq_len, head_dim)."""
    half = x.shape[-1] // 2
    frequency = base ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = torch.outer(torch.arange(x.shape[-2], device=x.device, dtype=torch.float32), frequency)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class LlamaAttention(nn.Module):
    """Grouped-query attention on x of shape (batch, seq_len, dim)."""

    def __init__(self, dim: int, *, num_heads: int, num_kv_heads: int) -> None:
        super().__init__()
        self.head_dim = dim // num_heads
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.query = nn.Linear(dim, dim, bias=False)
        self.key, self.value = (nn.Linear(dim, num_kv_heads * self.head_dim, bias=False) for _ in range(2))
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            project(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        q, k = rotate(q, base=500_000.0), rotate(k, base=500_000.0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(-2))
        return out


class LlamaMLP(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class Block(nn.Module):
    """A pre-norm residual block of any attention and MLP."""

    def __init__(self, attention_norm: nn.Module, attention: nn.Module, mlp_norm: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.attention_norm, self.attention = attention_norm, attention
        self.mlp_norm, self.mlp = mlp_norm, mlp

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class Llama3_405B(CausalLM):
    batch_size = 2048  # 16 M tokens of 8,192
    columns = ("attention.query", "attention.key", "attention.value", "mlp.gate", "mlp.up")
    rows = ("attention.out", "mlp.down")

    def __init__(
        self,
        *,
        num_layers: int = 126,
        dim: int = 16_384,
        hidden: int = 53_248,
        num_heads: int = 128,
        num_kv_heads: int = 8,
        vocab_size: int = 128_256,
        seq_len: int = 8192,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.num_layers, self.dim, self.hidden = num_layers, dim, hidden
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.vocab_size, self.seq_len = vocab_size, seq_len

    def configure_model(self) -> None:
        self.embed = nn.Embedding(self.vocab_size, self.dim)
        self.blocks = nn.ModuleList(self._block() for _ in range(self.num_layers))
        self.norm, self.head = nn.RMSNorm(self.dim), nn.Linear(self.dim, self.vocab_size, bias=False)

    def _block(self) -> Block:
        attention = LlamaAttention(self.dim, num_heads=self.num_heads, num_kv_heads=self.num_kv_heads)
        return Block(nn.RMSNorm(self.dim), attention, nn.RMSNorm(self.dim), LlamaMLP(self.dim, self.hidden))


# ---- BLOOM ----------------------------------------------------------------------------------------------------------


class BloomAttention(nn.Module):
    """Attention whose scores fall with distance, each head at its own rate (ALiBi, Press et al. 2021, arXiv:2108.12409)."""

    def __init__(self, dim: int, *, num_heads: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim = num_heads, dim // num_heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (-1, 3, self.head_dim)).permute(3, 0, 2, 1, 4).unbind(0)
        place = torch.arange(x.shape[1], device=x.device)
        distance = (place[None, :] - place[:, None]).to(x.dtype)
        rate = 2.0 ** (-8.0 * torch.arange(1, q.shape[1] + 1, device=x.device, dtype=x.dtype) / self.num_heads)
        bias = (rate[:, None, None] * distance).masked_fill(distance > 0, float("-inf"))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(-2))
        return out


class BloomMLP(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.gelu(self.up(x)))
        return out


class Bloom176B(CausalLM):
    batch_size = 2048
    columns = ("attention.qkv", "mlp.up")
    rows = ("attention.out", "mlp.down")

    def __init__(
        self,
        *,
        num_layers: int = 70,
        dim: int = 14_336,
        num_heads: int = 112,
        vocab_size: int = 250_880,
        seq_len: int = 2048,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.num_layers, self.dim, self.num_heads = num_layers, dim, num_heads
        self.vocab_size, self.seq_len = vocab_size, seq_len

    def configure_model(self) -> None:
        self.embed = nn.Embedding(self.vocab_size, self.dim)
        self.blocks = nn.ModuleList(self._block() for _ in range(self.num_layers))
        self.norm, self.head = nn.LayerNorm(self.dim), nn.Linear(self.dim, self.vocab_size, bias=False)
        self.head.weight = self.embed.weight

    def _block(self) -> Block:
        attention = BloomAttention(self.dim, num_heads=self.num_heads)
        return Block(nn.LayerNorm(self.dim), attention, nn.LayerNorm(self.dim), BloomMLP(self.dim))
