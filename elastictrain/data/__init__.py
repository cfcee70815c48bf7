"""Data: what is computed in which order, and where it comes from.

``SampleStream`` is the only public name here. It is imported when it is asked for, so that what looks into other
modules of this room does not pay for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elastictrain.data.stream import SampleStream

__all__ = ["SampleStream"]


def __getattr__(name: str) -> Any:
    if name == "SampleStream":
        from elastictrain.data.stream import SampleStream

        return SampleStream
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
