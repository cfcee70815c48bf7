"""What TensorBoard shows of a run beside scalars: text, pictures and hyperparameters, as its plugins read them.

On failure: hyperparameters that are no plain values, or too large for a double, are shown as text. Nothing else here can
fail.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
from tensorboard.plugins.hparams.summary_v2 import hparams_pb  # type: ignore[import-untyped]
from tensorboard.plugins.text.summary_v2 import text_pb  # type: ignore[import-untyped]

from elastictrain.metrics.ledger import ledger_folder
from elastictrain.metrics.picture import gantt_png
from elastictrain.metrics.timeline import timeline_markdown
from elastictrain.rundir import RunDir


@dataclass(frozen=True)
class Markdown:
    """A text with tables; HTML in it is shown as it is."""

    text: str


@dataclass(frozen=True)
class Picture:
    """A PNG file."""

    png: bytes

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in pixels."""
        width, height = struct.unpack(
            ">II", self.png[16:24]
        )  # of the header, which comes first (PNG 1.2, section 4.1.1)
        return width, height


Panel = Markdown | Picture


@dataclass(frozen=True)
class Panels:
    """Panels by name, as they are after ``step`` finished steps, at ``time`` in seconds since the epoch."""

    step: int
    time: float
    by_name: Mapping[str, Panel]


def ledger_panels(run_dir: RunDir) -> Callable[[], dict[str, Panel]]:
    """Draws what the ledger of a run tells by now: a table of events, and where the time of each node went."""
    ledger = ledger_folder(run_dir)

    def draw() -> dict[str, Panel]:
        lines = ledger.read()
        return {"run/events": Markdown(timeline_markdown(lines)), "run/nodes": Picture(gantt_png(lines))}

    return draw


def panels_summary(panels: Panels) -> Summary:
    """They in one summary."""
    summary = Summary()
    for name, panel in panels.by_name.items():
        if isinstance(panel, Markdown):
            summary.MergeFrom(text_pb(f"{name}/text_summary", panel.text))
        else:
            width, height = panel.size
            image = Summary.Image(width=width, height=height, colorspace=3)
            image.encoded_image_string = panel.png
            summary.value.add(tag=name, image=image)
    return summary


def hparams_summary(hparams: Mapping[str, Any], *, seconds: float) -> Summary:
    """What the HPARAMS tab shows of a run that began at ``seconds`` since the epoch. Nested names are joined by dots."""
    return hparams_pb(_flat(hparams), start_time_secs=seconds)


def _flat(values: Mapping[Any, Any], prefix: str = "") -> dict[str, bool | float | str]:
    flat: dict[str, bool | float | str] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[as_text(f"{prefix}{name}")] = _plain(value)
    return flat


def _plain(value: Any) -> bool | float | str:
    if isinstance(value, bool | float) or (isinstance(value, int) and abs(value) < 1e300):
        return value
    return as_text(value if isinstance(value, str) else repr(value))


def as_text(text: str) -> str:
    """As UTF-8 can have it: halves of surrogate pairs, of bytes that were no text, are written out."""
    return text.encode(errors="backslashreplace").decode()
