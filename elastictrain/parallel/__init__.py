"""How a model is laid out on ranks. Only :mod:`elastictrain.parallel.build` knows the order of wrapping.

``attention`` and ``positions`` are for models whose tokens several ranks may share (mesh axis ``cp``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elastictrain.parallel.context import attention, positions

__all__ = ["attention", "positions"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from elastictrain.parallel import context

    return getattr(context, name)
