"""The host memory that is said to be taken is what images turn out to have."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from elastictrain.checkpoint.footprint import Footprint, state_bytes
from tests.checkpoint.states import manager


def test_of_one_node_and_of_several() -> None:
    assert (Footprint(100, has_buddy=False).saves, Footprint(100, has_buddy=False).copies) == (200, 0)
    assert (Footprint(100, has_buddy=True).snapshots, Footprint(100, has_buddy=True).copies) == (400, 300)


@pytest.mark.parametrize(
    ("make", "moments"),
    [(torch.optim.AdamW, 2), (torch.optim.SGD, 0), (torch.optim.RMSprop, 1), (torch.optim.LBFGS, 2)],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_state_is_estimated_before_the_first_step_and_counted_after(
    make: type[torch.optim.Optimizer], moments: int, tmp_path: Path
) -> None:
    module = nn.Sequential(nn.Linear(1000, 100), nn.BatchNorm1d(100))
    weights, buffers = 4 * (100_000 + 300), 4 * 200 + 8
    optimizer = make(module.parameters(), lr=0.1)
    assert state_bytes(module, [optimizer]) == weights * (1 + moments) + buffers
    if make is torch.optim.LBFGS:  # its state is no tensor of each parameter: two are assumed
        return
    module(torch.randn(4, 1000)).sum().backward()
    optimizer.step()
    counted = state_bytes(module, [optimizer])
    state = {f"model.{name}": tensor for name, tensor in module.state_dict().items()}
    for i, values in enumerate(optimizer.state.values()):
        state |= {f"optim.{i}.{name}": value for name, value in values.items() if torch.is_tensor(value)}
    saved = manager(str(tmp_path)).save(1, state)
    assert saved.num_bytes == pytest.approx(counted, rel=0.01) == pytest.approx(weights * (1 + moments), rel=0.01)
