"""A byte-level transformer that learns to write Python from the standard library of the Python that runs it.

Nothing is downloaded: the text is the library's own source, cut into training and held-out *files*. The number to watch
is ``val/bpb``, bits per byte on the held-out files: 8 is what guessing blindly costs.

    elastictrain run examples/byte_lm.py:ByteLM --nproc-per-node 2 --run-dir runs/byte_lm --max-steps 300 --val-every 50

In any layout: ``--mesh dp_shard=2``, ``--mesh pp=2``, ``--mesh cp=2``, ``--mesh dp_shard=2,pp=2``.

Every argument of ``ByteLM`` can be given as ``--set``, e.g. ``--set dim=256 --set num_layers=6``.
"""

from __future__ import annotations

import functools
import hashlib
import math
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset

from elastictrain import Task, UsageError
from elastictrain.parallel import attention, positions

SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
MAX_FILE_BYTES = 256_000  # generated tables and the like would drown the rest
HELD_OUT_PERCENT = 5


@functools.cache
def stdlib_text(*, held_out: bool) -> Tensor:
    """The source text of the standard library, uint8 of shape (bytes,), file after file in the order of their names.

    A file is held out, or not, by the hash of its path inside the library: the same on every machine and in every
    version of Python that has the file. Raises UsageError where the library is not there as source.
    """
    root = Path(sysconfig.get_path("stdlib"))
    parts: list[bytes] = []
    for file in sorted(root.rglob("*.py")):
        name = file.relative_to(root)
        if SKIPPED_FOLDERS.isdisjoint(name.parts) and file.stat().st_size <= MAX_FILE_BYTES:
            bucket = int.from_bytes(hashlib.sha256(name.as_posix().encode()).digest()[:8], "little") % 100
            if (bucket < HELD_OUT_PERCENT) == held_out:
                parts.append(file.read_bytes())
    if not parts:
        raise UsageError(f"{root} holds no Python source: byte_lm learns from the standard library's .py files")
    return torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8)


class Windows(Dataset[Tensor]):
    """Windows of ``seq_len`` bytes and the byte that follows, int64 of shape (seq_len + 1,), end to end."""

    def __init__(self, text: Tensor, *, seq_len: int) -> None:
        self.text, self.seq_len = text, seq_len

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.seq_len

    def __getitem__(self, index: int) -> Tensor:
        start = index * self.seq_len
        return self.text[start : start + self.seq_len + 1].long()


def rotate(x: Tensor) -> Tensor:
    """Rotary positions (Su et al. 2021, arXiv:2104.09864) on x of shape (batch, heads, seq_len, head_dim)."""
    half = x.shape[-1] // 2
    frequency = 10_000.0 ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = torch.outer(positions(x.shape[-2], device=x.device).float(), frequency)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Block(nn.Module):
    """Pre-norm attention and MLP on x of shape (batch, seq_len, dim)."""

    def __init__(self, dim: int, *, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.dropout = num_heads, dim // num_heads, dropout
        self.attention_norm = nn.RMSNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.mlp_norm = nn.RMSNorm(dim)
        self.up = nn.Linear(dim, 4 * dim, bias=False)
        self.down = nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._drop(self._attend(self.attention_norm(x)))
        return x + self._drop(self.down(F.gelu(self.up(self.mlp_norm(x)))))

    def _attend(self, x: Tensor) -> Tensor:
        # Head by head, so that a part of the rows of qkv is a part of the heads (see tensor_parallel_plan).
        q, k, v = self.qkv(x).unflatten(-1, (-1, 3, self.head_dim)).permute(3, 0, 2, 1, 4).unbind(0)
        mixed = attention(rotate(q), rotate(k), v, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(-2))
        return out

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)


class ByteLM(Task):
    """A decoder-only transformer over bytes.

    Args:
        num_layers: blocks.
        dim: width of the residual stream; a multiple of twice ``num_heads``.
        num_heads: attention heads.
        seq_len: bytes in one sample.
        dropout: of both branches of every block.
        lr: peak learning rate.
        warmup_steps: steps of linear warm-up to ``lr``.
        decay_steps: the step at which the cosine has come down to a tenth of ``lr``; it stays there afterwards.
        weight_decay: on matrices only.
        val_samples: held-out samples per validation, spread evenly over the held-out files; 0 takes them all.

    Raises:
        UsageError: ``dim`` cannot be split into ``num_heads`` heads of even width.
    """

    batch_size = 32

    def __init__(
        self,
        *,
        num_layers: int = 4,
        dim: int = 128,
        num_heads: int = 4,
        seq_len: int = 128,
        dropout: float = 0.0,
        lr: float = 4e-3,
        warmup_steps: int = 50,
        decay_steps: int = 300,
        weight_decay: float = 0.1,
        val_samples: int = 512,
    ) -> None:
        super().__init__()
        if dim % (2 * num_heads):
            raise UsageError(f"dim={dim} must be a multiple of {2 * num_heads}, twice num_heads={num_heads}")
        self.save_hyperparameters()
        self.num_layers, self.dim, self.num_heads = num_layers, dim, num_heads
        self.seq_len, self.dropout, self.val_samples = seq_len, dropout, val_samples
        self.lr, self.warmup_steps, self.decay_steps, self.weight_decay = lr, warmup_steps, decay_steps, weight_decay

    def configure_model(self) -> None:
        if hasattr(self, "blocks"):  # Lightning calls this once per fit, test, …
            return
        self.embed = nn.Embedding(256, self.dim)
        blocks = (Block(self.dim, num_heads=self.num_heads, dropout=self.dropout) for _ in range(self.num_layers))
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.RMSNorm(self.dim)
        self.head = nn.Linear(self.dim, 256, bias=False)

    def collate_fn(self, windows: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Bytes and the byte that follows each, both (batch, seq_len)."""
        batch = torch.stack(windows)
        return batch[:, :-1], batch[:, 1:]

    def train_dataset(self) -> Windows:
        return Windows(stdlib_text(held_out=False), seq_len=self.seq_len)

    def val_dataset(self) -> Subset[Tensor]:
        windows = Windows(stdlib_text(held_out=True), seq_len=self.seq_len)
        stride = max(1, len(windows) // self.val_samples) if self.val_samples else 1
        return Subset(windows, range(0, len(windows), stride)[: self.val_samples or None])

    def tokens_per_sample(self) -> int:
        return self.seq_len

    def tensor_parallel_plan(self) -> dict[str, str]:
        """With ``--mesh tp=N`` a rank has some of the heads, some of the MLP and some of the vocabulary."""
        return {
            "embed": "embedding_rowwise",
            "blocks.*.qkv": "colwise",
            "blocks.*.out": "rowwise",
            "blocks.*.up": "colwise",
            "blocks.*.down": "rowwise",
            "head": "colwise_loss_parallel",
        }

    def context_parallel_plan(self) -> dict[int, int]:
        """With ``--mesh cp=N`` a rank has some of the bytes of every window, of both entries of a batch."""
        return {0: 1, 1: 1}

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next byte, (batch, seq_len, 256), from int64 bytes (batch, seq_len)."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def loss(self, outputs: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Mean nats per byte."""
        return F.cross_entropy(outputs.flatten(0, 1), batch[1].flatten())

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        loss = self.loss(self(self.inputs(batch)), batch)
        self.log("val/bpb", loss / math.log(2), prog_bar=True, sync_dist=True, batch_size=len(batch[0]))

    def configure_optimizers(self) -> OptimizerLRScheduler:
        matrices = [parameter for parameter in self.parameters() if parameter.ndim >= 2]
        gains = [parameter for parameter in self.parameters() if parameter.ndim < 2]
        groups = [{"params": matrices, "weight_decay": self.weight_decay}, {"params": gains, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=self.lr, betas=(0.9, 0.95))
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, self._lr_factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def _lr_factor(self, step: int) -> float:
        """Learning rate over its peak after ``step`` steps."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        progress = min(1.0, (step - self.warmup_steps) / max(1, self.decay_steps - self.warmup_steps))
        return 0.1 + 0.45 * (1.0 + math.cos(math.pi * progress))
