"""From ``--callback NAME[:k=v,...]`` to a callback.

NAME is one of

* a callback that comes with elastictrain, by its file or its class and in any spelling: ``gradient-clipping``,
  ``gradient_clipping``, ``GradientClipping``;
* an entry point of the group ``elastictrain.callbacks``, under its own name;
* ``package.module:Class``, then ``package.module:Class:k=v,...``. What follows the first colon is a class if it is an
  identifier and what stands before is no known name.

:mod:`elastictrain.named` has how arguments are read.

On failure: every problem is a UsageError, one line with the remedy. :func:`parse_callback` finds those that need no
import (unknown name, malformed arguments) and imports no torch, so that the command line can say so at once.
"""

from __future__ import annotations

import importlib.metadata
from typing import TYPE_CHECKING, cast

from elastictrain.callbacks import HOME
from elastictrain.named import Spec, convert, kebab, load, make, parse

if TYPE_CHECKING:
    from lightning.pytorch.callbacks import Callback as LightningCallback

    from elastictrain.callback import Callback

GROUP = "elastictrain.callbacks"


def known_callbacks() -> dict[str, str]:
    """``{name: "module:Class"}`` of the callbacks that come with elastictrain and of installed entry points."""
    known = _own_callbacks()
    for entry in importlib.metadata.entry_points(group=GROUP):
        known.setdefault(entry.name, entry.value)
    return known


def _own_callbacks() -> dict[str, str]:
    return {kebab(module.rpartition(".")[2]): f"{module}:{name}" for name, module in HOME.items()}


def parse_callback(text: str) -> Spec:
    """Read ``NAME[:k=v,...]``.

    Raises:
        UsageError: the name is unknown (lists those known, and the closest), or the arguments are not ``k=v,...``.
    """
    aliases = {kebab(cls): f"{module}:{cls}" for cls, module in HOME.items()}
    own = _own_callbacks()
    known = (
        own if text.partition(":")[0] in own else known_callbacks()
    )  # looking through all that is installed takes a while
    return parse("--callback", text, known, what="callback", aliases=aliases)


def resolve_callback(text: str) -> Callback | LightningCallback:
    """Make the callback that ``NAME[:k=v,...]`` names; one of Lightning's may be named by ``module:Class``.

    Raises:
        UsageError: as :func:`parse_callback`; the module or class is not there, the class is no callback, an argument
            is unknown, missing, or not of its type.
    """
    from lightning.pytorch.callbacks import Callback as LightningCallback

    from elastictrain.callback import Callback

    spec = parse_callback(text)
    cls = load(spec, (Callback, LightningCallback), wanted="elastictrain.Callback")
    return cast("Callback | LightningCallback", make(spec, cls, convert(spec, cls)))
