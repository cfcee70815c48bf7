"""TensorBoard event files in ``tensorboard/``, one Event per logged step with all its scalars.

On a local or shared disk each generation grows one file, which this process alone opens. An object store cannot append:
there, each write is a segment, a whole event file of its own. Names sort by (generation, sequence) because TensorBoard
reads files in the order of their names and forgets, or draws twice, what comes out of order.

The first file of a generation opens with ``SessionLog.START``: TensorBoard then drops what earlier files hold at the
steps that this generation does again, so that a restart draws no zigzag. It also has the charts of the "Custom Scalars" tab
(:mod:`elastictrain.metrics.layout`) and the hyperparameters.

On failure: :meth:`EventFiles.write` raises what the store raised, having left none of the records behind.
"""

from __future__ import annotations

import functools
import logging
import os
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # type: ignore[import-untyped]

from elastictrain.metrics.layout import layout_summary
from elastictrain.metrics.panels import Panels, as_text, hparams_summary, panels_summary
from elastictrain.metrics.record import Record, Series
from elastictrain.rundir import RunDir, first_line

log = logging.getLogger(__name__)

FOLDER = "tensorboard"


class EventFiles:
    """Writes records as events.

    Args:
        start_step: finished steps at which this generation begins.
        hparams: names and values of hyperparameters.
        run: the folder of a run of its own within the run's, in TensorBoard's sense; it has no charts.
    """

    what = "TensorBoard events"

    def __init__(
        self,
        run_dir: RunDir,
        *,
        generation: int,
        start_step: int,
        hparams: Mapping[str, Any] | None = None,
        run: str = "",
    ) -> None:
        folder = f"{FOLDER}/{run}" if run else FOLDER
        self._series = Series(run_dir, folder, pattern="events.out.tfevents.{}", generation=generation)
        self._start_step = start_step
        self._hparams, self._has_charts = hparams, not run
        self._started = False
        self._is_local = run_dir.is_local
        self._path: str | None = None  # of the growing file
        self._size = 0

    def begin_at(self, step: int) -> None:
        """What is written begins after ``step`` finished steps, if that is earlier; before the first write."""
        self._start_step = min(self._start_step, step)

    def write(self, records: Sequence[Record | Panels]) -> None:
        events = encode_events(records)
        if self._path is not None and self._append(events):
            return
        first = records[0]
        header = self._header(first[2] if isinstance(first, tuple) else first.time)
        path = self._series.create(header + events)
        self._started = True
        if self._is_local:
            self._path, self._size = path, len(header) + len(events)

    def _append(self, data: bytes) -> bool:
        """Append to the growing file; False if it is no longer what we left."""
        assert self._path is not None
        try:
            file = open(self._path, "r+b", buffering=0)  # noqa: SIM115 - a missing file is not made again
        except FileNotFoundError:
            return False
        with file:
            if file.seek(0, os.SEEK_END) != self._size:
                return False
            try:
                view = memoryview(data)
                while view:
                    view = view[file.write(view) :]
            except OSError:
                file.truncate(self._size)  # half a record would hide all later ones
                raise
        self._size += len(data)
        return True

    def _header(self, seconds: float) -> bytes:
        if self._started:
            return encode_header(seconds)
        # What was saved is not done again: replaced is what comes after it. Before the first step there may be values, too.
        first = self._start_step + 1 if self._start_step > 0 else 0
        return encode_header(seconds, first=first, charts=self._has_charts, hparams=self._hparams)


def encode_header(
    seconds: float, *, first: int | None = None, charts: bool = False, hparams: Mapping[str, Any] | None = None
) -> bytes:
    """What an event file begins with.

    Args:
        seconds: since the epoch.
        first: everything at this step and later, in this file and those before it, is replaced by what follows; None:
            nothing is.
        charts: of the "Custom Scalars" tab.
    """
    events = [Event(wall_time=seconds, file_version="brain.Event:2")]
    if first is not None:
        events.append(Event(wall_time=seconds, step=first, session_log=SessionLog(status=SessionLog.START)))
    if charts:
        events.append(Event(wall_time=seconds, summary=layout_summary()))
    if hparams:
        try:
            events.append(Event(wall_time=seconds, summary=hparams_summary(hparams, seconds=seconds)))
        except Exception as error:  # each write would fail again, and nothing be seen of the run
            log.warning("TensorBoard will not show the hyperparameters (%s)", first_line(error))
    return _frame(events)


def encode_events(records: Sequence[Record | Panels]) -> bytes:
    """The records as TFRecord-framed events."""
    events = []
    for record in records:
        if isinstance(record, Panels):
            events.append(Event(wall_time=record.time, step=record.step, summary=panels_summary(record)))
            continue
        step, _, seconds, _, values = record
        event = Event(wall_time=seconds, step=step)
        for name, value in values.items():
            event.summary.value.add(tag=name if name.isascii() else as_text(name), simple_value=value)
        events.append(event)
    return _frame(events)


def _frame(events: Sequence[Event]) -> bytes:
    """TFRecord framing: length, its checksum, data, its checksum."""
    parts = []
    for event in events:
        data = event.SerializeToString()
        parts += [_length(len(data)), data, _checksum(data)]
    return b"".join(parts)


# ---- checksum ------------------------------------------------------------------------------------------------------
#
# TensorBoard's own RecordWriter computes it byte by byte in Python, which for an event of 20 scalars costs four times
# as much as all the rest, and while that thread computes the training loop waits for the interpreter.

_BLOCK = 1024


@functools.cache
def _tables() -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.intp]]:
    """What byte ``b`` at ``i`` of a block of 1024 adds to the block's CRC-32C is at ``offsets[i] + b``."""
    byte = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        byte = np.where(byte & 1, (byte >> 1) ^ np.uint32(0x82F63B78), byte >> 1).astype(np.uint32)
    tables = np.empty((_BLOCK, 256), np.uint32)
    tables[0] = byte
    for i in range(1, _BLOCK):  # one byte further from the end
        tables[i] = (tables[i - 1] >> 8) ^ byte[tables[i - 1] & 0xFF]
    return tables.ravel(), np.arange(_BLOCK - 1, -1, -1) * 256


def crc32c(data: bytes) -> int:
    """CRC-32C (Castagnoli, RFC 3720 appendix B.4). It is linear: a block is a table look-up per byte and one XOR."""
    table, offsets = _tables()
    state = 0xFFFFFFFF
    for start in range(0, len(data), _BLOCK):
        block = np.frombuffer(data, np.uint8, min(_BLOCK, len(data) - start), start)
        size = len(block)
        index = block.astype(np.intp)
        index[:4] ^= np.frombuffer(state.to_bytes(4, "little"), np.uint8, min(4, size))
        index += offsets[_BLOCK - size :]
        state = int(np.bitwise_xor.reduce(table[index])) ^ (state >> 8 * size)
    return state ^ 0xFFFFFFFF


def _checksum(data: bytes) -> bytes:
    """CRC-32C, masked as TFRecord wants it."""
    crc = crc32c(data)
    return struct.pack("<I", (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF)


@functools.lru_cache(maxsize=1024)
def _length(size: int) -> bytes:
    length = struct.pack("<Q", size)
    return length + _checksum(length)
