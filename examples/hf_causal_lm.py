"""A language model of ``transformers`` as a task, trained from nothing on the English of Python's own manual, byte by byte.

Nothing is downloaded: the text is ``pydoc_data.topics``, what ``help()`` shows, of the Python that runs it; a byte is a
token. The number to watch is ``val/bpb``, bits per byte on held-out topics: 8 is what guessing blindly costs.

    elastictrain run examples/hf_causal_lm.py:CausalLM --nproc-per-node 2 --run-dir runs/hf --max-steps 200 --val-every 50

In any layout: ``--mesh dp_shard=2``, ``--mesh pp=2``, and ``--mesh tp=2``, which takes the plan that the model brings.
Another architecture: ``--set model_type=qwen3``, ``mixtral``, ``gemma3_text``, … (``pip install 'elastictrain[hf]'``).
"""

from __future__ import annotations

import math
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset
from transformers import AutoConfig, AutoModelForCausalLM

from elastictrain import Task


class Windows(Dataset[Tensor]):
    """Windows of ``seq_len`` bytes and the byte that follows, int64 of (seq_len + 1,); every tenth topic is held out."""

    def __init__(self, *, seq_len: int, held_out: bool) -> None:
        chosen = [text for index, text in enumerate(topics.values()) if (index % 10 == 0) == held_out]
        self.text = torch.frombuffer(bytearray("\n".join(chosen).encode()), dtype=torch.uint8)
        self.seq_len = seq_len

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.seq_len

    def __getitem__(self, index: int) -> Tensor:
        start = index * self.seq_len
        return self.text[start : start + self.seq_len + 1].long()


class CausalLM(Task):
    """Any causal language model of transformers, by the name of its configuration.

    Args:
        model_type: ``llama``, ``qwen3``, ``mixtral``, ``gemma3_text``, … as ``transformers.AutoConfig`` knows them.
        num_layers, dim, num_heads, seq_len: the size of the model; heads of keys and values are half as many.
        lr: learning rate.
    """

    batch_size = 32

    def __init__(
        self,
        *,
        model_type: str = "llama",
        num_layers: int = 4,
        dim: int = 128,
        num_heads: int = 4,
        seq_len: int = 128,
        lr: float = 2e-3,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model_type, self.seq_len, self.lr = model_type, seq_len, lr
        self.sizes = {
            "hidden_size": dim,
            "intermediate_size": 3 * dim,
            "num_hidden_layers": num_layers,
            "num_attention_heads": num_heads,
            "num_key_value_heads": max(1, num_heads // 2),
            "head_dim": dim // num_heads,
            "max_position_embeddings": seq_len,
        }

    def configure_model(self) -> None:
        if hasattr(self, "model"):  # Lightning calls this once per fit, test, …
            return
        no_special_tokens = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
        config = AutoConfig.for_model(self.model_type, vocab_size=256, **self.sizes, **no_special_tokens)
        self.model = AutoModelForCausalLM.from_config(config)

    def train_dataset(self) -> Windows:
        return Windows(seq_len=self.seq_len, held_out=False)

    def val_dataset(self) -> Windows:
        return Windows(seq_len=self.seq_len, held_out=True)

    def inputs(self, batch: Tensor) -> Tensor:
        return batch[:, :-1]

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next byte, (batch, seq_len, 256), from int64 bytes (batch, seq_len)."""
        logits: Tensor = self.model(input_ids=tokens, use_cache=False).logits
        return logits

    def loss(self, outputs: Tensor, batch: Tensor) -> Tensor:
        return F.cross_entropy(outputs.flatten(0, 1), batch[:, 1:].flatten())

    def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        loss = self.loss(self(self.inputs(batch)), batch)
        self.log("val/bpb", loss / math.log(2), prog_bar=True, sync_dist=True, batch_size=len(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr, betas=(0.9, 0.95))

    def tokens_per_sample(self) -> int:
        return self.seq_len
