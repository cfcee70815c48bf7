"""What is kept of torchmetrics objects over a checkpoint, and the few private names that takes, pinned by tests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_mean

from elastictrain.state import FlatState, pack, unpack


def last_value(metric: Metric) -> Any:
    """What the latest ``metric(...)`` call returned."""
    return metric._forward_cache


def share_metrics(module: nn.Module, group: Any) -> None:
    """The metrics of the module merge over the ranks of ``group``, unless they were given a group of their own."""
    for _, metric in _metrics(module):
        if metric.process_group is None:
            metric.process_group = group


def has_updates(module: nn.Module) -> bool:
    """Has any metric of the module gathered something?"""
    return any(metric.update_count for _, metric in _metrics(module))


def metric_state(module: nn.Module, *, world_size: int) -> FlatState:
    """``metrics.{attribute}``: what the metrics of the module have gathered over all ranks. A collective."""
    flat: FlatState = {}
    for name, metric in _metrics(module):
        if world_size > 1:
            metric.sync()
        try:
            states = {key: _kept(value) for key, value in metric.metric_state.items()}
            flat.update(pack(f"metrics.{name}", {"count": metric.update_count, "states": states}))
        finally:
            if world_size > 1:
                metric.unsync()
    return flat


def load_metric_state(module: nn.Module, flat: Mapping[str, Any], *, is_main: bool) -> None:
    """The first rank takes back what all had and the others start from nothing, so that together they have it once.

    A state that is averaged over ranks is given to all of them.
    """
    for name, metric in _metrics(module):
        if f"metrics.{name}" not in flat:
            continue
        saved = unpack(f"metrics.{name}", flat)
        metric.reset()
        for key, value in saved["states"].items():
            if is_main or metric._reductions[key] is dim_zero_mean:
                setattr(metric, key, _restored(metric, key, value))
        metric._update_count = saved["count"]


@contextmanager
def metrics_kept(module: nn.Module) -> Iterator[None]:
    """Whatever the metrics of the module are told within is forgotten afterwards."""
    kept = []
    for _, metric in _metrics(module):
        states = {
            key: list(value) if isinstance(value, list) else _copy(value) for key, value in metric.metric_state.items()
        }
        kept.append((metric, {**states, "_update_count": metric._update_count, "_computed": metric._computed}))
    try:
        yield
    finally:
        for metric, values in kept:
            for name, value in values.items():
                setattr(metric, name, value)


def _restored(metric: Metric, key: str, value: Any) -> Any:
    """A state as the metric holds it: on its device, and a list where it is one; over ranks that was concatenated."""
    if isinstance(value, Tensor):
        value = value.to(metric.device)
        return [value] if isinstance(metric._defaults[key], list) else value
    return [item.to(metric.device) for item in value]


def _metrics(module: nn.Module) -> Iterator[tuple[str, Metric]]:
    return ((name, m) for name, m in module.named_modules() if isinstance(m, Metric))


def _kept(value: Any) -> Any:
    return [item.detach().clone() for item in value] if isinstance(value, list) else _copy(value)


def _copy(value: Tensor) -> Tensor:
    return value.detach().clone()
