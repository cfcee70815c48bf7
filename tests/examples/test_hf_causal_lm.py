"""The example of a transformers model: its data, and that several architectures learn from it."""

from __future__ import annotations

import math

import pytest
import torch

from elastictrain import Trainer
from examples.hf_causal_lm import CausalLM, Windows
from tests.helpers import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore")
SMALL = {"num_layers": 1, "dim": 32, "num_heads": 2, "seq_len": 32}


def test_held_out_topics_are_not_trained_on() -> None:
    train, held_out = (Windows(seq_len=64, held_out=flag) for flag in (False, True))
    assert 0.02 < len(held_out.text) / len(train.text) < 0.3
    assert train[0].dtype == torch.int64 and train[len(train) - 1].shape == (65,)
    assert train[0][-1] == train[1][0]
    assert bytes(held_out.text[:200].tolist()) not in bytes(train.text.tolist())


def _learns(rank: int, world_size: int) -> dict[str, float]:
    found = {}
    for model_type in ("llama", "gemma3_text"):
        task = CausalLM(**SMALL, model_type=model_type, lr=0.02)
        Trainer(max_steps=10, global_batch_size=8).fit(task)
        batch = torch.stack([task.val_dataset()[index] for index in range(16)])
        with torch.no_grad():
            found[model_type] = float(task.loss(task(task.inputs(batch)), batch))
    return found


def test_several_architectures_learn() -> None:
    (found,) = run_ranks(_learns, 1)
    assert all(loss < 0.9 * math.log(256) for loss in found.values()), found
