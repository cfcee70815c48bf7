"""Checkpoints: how state is kept on storage, and found and loaded again in any layout.

``RUN_DIR/checkpoints/step-00001000/<attempt>/`` holds a safetensors file and a JSON manifest per rank, and COMMIT.
Nothing is ever overwritten, renamed, appended or unpickled.

The names below load on first use, because the writer process has no use for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elastictrain.checkpoint.catalog import resolve
    from elastictrain.checkpoint.manager import CheckpointManager
    from elastictrain.checkpoint.manifest import DamagedError
    from elastictrain.checkpoint.reader import CheckpointReader

_HOME = {
    "CheckpointManager": "elastictrain.checkpoint.manager",
    "CheckpointReader": "elastictrain.checkpoint.reader",
    "DamagedError": "elastictrain.checkpoint.manifest",
    "resolve": "elastictrain.checkpoint.catalog",
}

__all__ = ["CheckpointManager", "CheckpointReader", "DamagedError", "resolve"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
