"""Options that several commands have, declared once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import click

Function = TypeVar("Function", bound=Callable[..., Any])

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 110}
POSITIVE = click.IntRange(min=1)


@dataclass
class Call:
    """One call of the command.

    Args:
        began: when, seconds since the epoch.
        has_trained: it has been an agent's, and is over.
    """

    began: float
    has_trained: bool = False


def option(name: str, *more: str, pet: str | None = None, **attributes: Any) -> Callable[[Function], Function]:
    """An option that is also read from ELASTICTRAIN_NAME and, where torchrun has it, from its PET_ variable."""
    variable = name.lstrip("-").upper().replace("-", "_")
    variables = [f"ELASTICTRAIN_{variable}", *([f"PET_{pet}"] if pet else [])]
    return click.option(name, *more, envvar=variables, **attributes)


_SHARED: dict[str, dict[str, Any]] = {
    "--nnodes": {
        "pet": "NNODES",
        "default": "1",
        "metavar": "MIN[:MAX]",
        "help": "How many nodes take part. [1]",
    },
    "--nproc-per-node": {
        "pet": "NPROC_PER_NODE",
        "default": "auto",
        "metavar": "N|auto",
        "help": "Workers on each node; auto: one for each GPU of this one, or one. [auto]",
    },
    "--global-batch-size": {
        "type": POSITIVE,
        "metavar": "N",
        "help": "Samples per step, over all workers. [the task's batch_size]",
    },
    "--micro-batch-size": {
        "type": POSITIVE,
        "metavar": "N",
        "help": "Samples computed at a time. [an eighth of the global batch, or the DataLoader's batch]",
    },
    "--mesh": {"metavar": "auto|AXIS=N,…", "help": "Parallel layout, such as dp_shard=2. [auto]"},
    "--callback": {
        "multiple": True,
        "metavar": "NAME[:k=v,…]",
        "help": "Add a callback, such as ema or gradient-clipping:norm=1; may be repeated.",
    },
    "--set": {"multiple": True, "metavar": "k=v", "help": "An argument of the target's __init__; may be repeated."},
}
_PARAMETERS = {"--callback": ["callbacks"], "--set": ["settings"]}  # where they are not called as the option is


def shared(name: str, **changes: Any) -> Callable[[Function], Function]:
    """One of the options above, with what is different for a command."""
    return option(name, *_PARAMETERS.get(name, []), **{**_SHARED[name], **changes})
