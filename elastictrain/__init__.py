"""A trainer whose runtime survives machines coming and going.

The names below load on first use, so that the command line answers without importing torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elastictrain.callback import Callback
    from elastictrain.config import CheckpointConfig, MeshConfig, Weights
    from elastictrain.errors import ElasticTrainError, UsageError
    from elastictrain.task import Task
    from elastictrain.trainer import Trainer

__version__ = "0.1.0"

_HOME = {
    "Callback": "elastictrain.callback",
    "CheckpointConfig": "elastictrain.config",
    "ElasticTrainError": "elastictrain.errors",
    "MeshConfig": "elastictrain.config",
    "Task": "elastictrain.task",
    "Trainer": "elastictrain.trainer",
    "UsageError": "elastictrain.errors",
    "Weights": "elastictrain.config",
}

__all__ = [
    "Callback",
    "CheckpointConfig",
    "ElasticTrainError",
    "MeshConfig",
    "Task",
    "Trainer",
    "UsageError",
    "Weights",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
