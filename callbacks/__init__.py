"""Callbacks that come with elastictrain; each is one small file on the public callback API.

The names below load on first use: looking a name up (:mod:`elastictrain.callbacks.registry`) imports no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if __name__ != "elastictrain.callbacks":
    # The folder is at the top of the repository and could be found there too: every class would then exist twice.
    raise ImportError(f"import elastictrain.callbacks, not {__name__}")

if TYPE_CHECKING:
    from elastictrain.callbacks.activation_checkpointing import ActivationCheckpointing
    from elastictrain.callbacks.compile import Compile
    from elastictrain.callbacks.early_stopping import EarlyStopping
    from elastictrain.callbacks.ema import EMA
    from elastictrain.callbacks.gradient_accumulation import GradientAccumulation
    from elastictrain.callbacks.gradient_clipping import GradientClipping
    from elastictrain.callbacks.learning_rate_monitor import LearningRateMonitor
    from elastictrain.callbacks.mixed_precision import MixedPrecision
    from elastictrain.callbacks.progress import ProgressBar
    from elastictrain.callbacks.throughput_monitor import ThroughputMonitor

HOME = {
    "ActivationCheckpointing": "elastictrain.callbacks.activation_checkpointing",
    "Compile": "elastictrain.callbacks.compile",
    "EMA": "elastictrain.callbacks.ema",
    "EarlyStopping": "elastictrain.callbacks.early_stopping",
    "GradientAccumulation": "elastictrain.callbacks.gradient_accumulation",
    "GradientClipping": "elastictrain.callbacks.gradient_clipping",
    "LearningRateMonitor": "elastictrain.callbacks.learning_rate_monitor",
    "MixedPrecision": "elastictrain.callbacks.mixed_precision",
    "ProgressBar": "elastictrain.callbacks.progress",
    "ThroughputMonitor": "elastictrain.callbacks.throughput_monitor",
}

__all__ = [
    "EMA",
    "ActivationCheckpointing",
    "Compile",
    "EarlyStopping",
    "GradientAccumulation",
    "GradientClipping",
    "LearningRateMonitor",
    "MixedPrecision",
    "ProgressBar",
    "ThroughputMonitor",
]


def __getattr__(name: str) -> Any:
    if name not in HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
