"""What a model of ``transformers`` is beside its weights: its configuration, and where it is in a task.

Uses public names only, and imports nothing: where nobody has imported transformers there is no model of it.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from torch import nn


def description(module: nn.Module) -> dict[str, Any] | None:
    """Of the outermost ``PreTrainedModel`` within ``module``: what an export needs, as JSON holds it.

    None where there is none, or its configuration has something that JSON cannot hold.

    ``prefix`` is of its tensors' names within ``module``; ``config`` and ``generation`` are the contents of
    ``config.json`` and ``generation_config.json``, the latter None where it generates nothing.
    """
    transformers: Any = sys.modules.get("transformers")
    base = getattr(transformers, "PreTrainedModel", None)
    if base is None:
        return None
    found = next(((name, m) for name, m in module.named_modules() if isinstance(m, base)), None)
    if found is None:
        return None
    name, model = found
    # Sharding gives a module a class of its own, derived from the model's.
    own = next(c for c in type(model).__mro__ if issubclass(c, base) and not c.__module__.startswith("torch."))
    generation = getattr(model, "generation_config", None)
    try:
        kept = {
            "prefix": f"{name}." if name else "",
            "config": {**json.loads(model.config.to_json_string()), "architectures": [own.__name__]},
            "generation": None if generation is None else json.loads(generation.to_json_string()),
        }
        json.dumps(kept, allow_nan=False)
    except (TypeError, ValueError):  # something that JSON has not: no reason to save nothing
        return None
    return kept
