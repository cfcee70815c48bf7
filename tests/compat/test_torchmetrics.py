"""torchmetrics objects over a checkpoint, on any number of ranks; and the private names that it takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchmetrics import CatMetric, MaxMetric, MeanMetric, Metric, MetricCollection, MinMetric, SumMetric
from torchmetrics.classification import MulticlassF1Score, MulticlassPrecision

from elastictrain.compat.torchmetrics import last_value, load_metric_state, metric_state
from tests.helpers import run_ranks

VALUES = torch.arange(12, dtype=torch.float32).mul(0.37).sin()
TARGETS = torch.arange(12) % 3


class Average(Metric):
    """A state that is averaged over ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("level", torch.zeros(()), dist_reduce_fx="mean")

    def update(self, value: Tensor) -> None:
        self.level = self.level * 0 + 4.0

    def compute(self) -> Tensor:
        return self.level


def _module() -> nn.Module:
    module = nn.Module()
    module.cat, module.sum, module.mean = CatMetric(), SumMetric(), MeanMetric()
    module.max, module.min, module.average = MaxMetric(), MinMetric(), Average()
    kinds: Any = {"num_classes": 3, "average": "macro"}
    module.collection = MetricCollection([MulticlassPrecision(**kinds), MulticlassF1Score(**kinds)])
    return module


def _update(module: Any, start: int, stop: int, rank: int = 0, world_size: int = 1) -> None:
    for i in range(start, stop):
        if i % world_size == rank:
            value = VALUES[i]
            for metric in (module.cat, module.sum, module.mean, module.max, module.min, module.average):
                metric.update(value)
            module.collection.update(nn.functional.one_hot(TARGETS[i : i + 1] * i % 3, 3).float(), TARGETS[i : i + 1])


def _computed(module: Any) -> dict[str, float]:
    names = ("sum", "mean", "max", "min", "average")
    values = {name: float(getattr(module, name).compute()) for name in names}
    values |= {f"cat{i}": value for i, value in enumerate(sorted(module.cat.compute().tolist()))}
    return values | {name: float(value) for name, value in module.collection.compute().items()}


def _part(rank: int, world_size: int, flat: Any, start: int, stop: int) -> tuple[Any, Any]:
    """Go on from ``flat``: the state after it, and what the metrics compute then."""
    if world_size > 1:
        dist.init_process_group("gloo")
    module = _module()
    if flat is not None:
        load_metric_state(module, flat, is_main=rank == 0)
    _update(module, start, stop, rank, world_size)
    state = metric_state(module, world_size=world_size)
    return state, _computed(module)


@pytest.mark.parametrize("sizes", [(1, 1), (1, 2), (2, 1), (2, 2), (3, 2)])
def test_metrics_go_on_on_other_ranks(sizes: tuple[int, int]) -> None:
    """As if one rank had seen everything, whoever has seen what before and after."""
    whole = _module()
    _update(whole, 0, 12)
    first = run_ranks(_part, sizes[0], None, 0, 7)
    assert all(state.keys() == first[0][0].keys() for state, _ in first)
    last = run_ranks(_part, sizes[1], first[0][0], 7, 12)
    for _, computed in last:
        assert computed == pytest.approx(_computed(whole))


def test_a_metric_that_is_not_in_the_state_stays_as_it_is() -> None:
    module = _module()
    _update(module, 0, 5)
    before = _computed(module)
    load_metric_state(module, {}, is_main=True)
    assert _computed(module) == before


def test_private_names() -> None:
    metric = MeanMetric()
    assert last_value(metric) is None
    metric(torch.tensor(2.0))
    assert last_value(metric) == 2.0
    assert metric._forward_cache is last_value(metric)
    assert metric._update_count == metric.update_count == 1
    metric._update_count = 5
    assert metric.update_count == 5
    assert metric._reductions.keys() == metric._defaults.keys() == metric.metric_state.keys()
    assert isinstance(CatMetric()._defaults["value"], list)
    from torchmetrics.utilities import dim_zero_mean

    assert Average()._reductions["level"] is dim_zero_mean
