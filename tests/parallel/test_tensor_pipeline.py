"""Tensor parallelism within pipeline stages: the numbers of one process."""

from __future__ import annotations

import functools

import pytest
import torch

from elastictrain.callbacks import GradientClipping
from tests.helpers import apart, run_ranks
from tests.parallel.llama import Options, Seen, steps_of

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def _train(rank: int, world_size: int, options: Options, mesh: str) -> Seen:
    return steps_of(options, mesh, callbacks=[GradientClipping(norm=0.3)])  # a wrong norm shows in the next loss


one_rank = functools.cache(lambda options: run_ranks(_train, 1, options, "auto")[0])


@pytest.mark.parametrize(
    ("world_size", "mesh", "options"),
    [
        (4, "tp=2,pp=2", Options(plan="plain")),
        (4, "tp=2,pp=2", Options(plan="sequence", dropout=0.0, optimizer="adamw")),
        (4, "tp=2,pp=2,pp_schedule=ZBV", Options(plan="sequence", num_layers=4)),
        (4, "tp=2,pp=2", Options(plan="loss", units=True)),
        (4, "tp=2,pp=2", Options(plan="plain", tied=True, frozen=("n1",))),
        (8, "pp=2,dp_shard=2,tp=2", Options(plan="sequence", tied=True)),
    ],
    ids=str,
)
def test_every_axis_at_once(world_size: int, mesh: str, options: Options) -> None:
    expected = one_rank(options)
    held: set[str] = set()
    for seen in run_ranks(_train, world_size, options, mesh, timeout=150):
        assert seen.losses.keys() == expected.losses.keys()
        assert max(apart(seen.losses[step], expected.losses[step]) for step in expected.losses) <= 1e-6
        # AdamW makes a step of a gradient that is all but zero, and whichever way that was rounded.
        atol = 1e-4 if options.optimizer == "adamw" else 1e-5
        for name, tensor in seen.weights.items():
            whole = expected.weights["embed.weight" if options.tied and name == "head.weight" else name]
            torch.testing.assert_close(tensor, whole, rtol=1e-4, atol=atol, msg=name)
        held |= seen.weights.keys()
    assert held >= expected.weights.keys()
