"""TensorBoard event files in ``tensorboard/``, one Event per logged step with all its scalars.

On a local or shared disk each generation grows one file, which this process alone opens. An object store cannot append:
there, each write is a segment, a whole event file of its own. Names sort by (generation, sequence) because TensorBoard
reads files in the order of their names and forgets, or draws twice, what comes out of order.

The first file of a generation opens with ``SessionLog.START``: TensorBoard then drops what earlier files hold at the
steps that this generation does again, so that a restart draws no zigzag. It also has the charts of the "Custom Scalars" tab
(:mod:`elastictrain.metrics.layout`).

On failure: :meth:`EventFiles.write` raises what the store raised, having left none of the records behind.
"""

from __future__ import annotations

import functools
import os
import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # type: ignore[import-untyped]

from elastictrain.metrics.layout import layout_summary
from elastictrain.metrics.record import Record, Series
from elastictrain.rundir import RunDir

FOLDER = "tensorboard"


class EventFiles:
    """Writes records as events.

    Args:
        start_step: finished steps at which this generation begins.
    """

    what = "TensorBoard events"

    def __init__(self, run_dir: RunDir, *, generation: int, start_step: int) -> None:
        self._series = Series(run_dir, FOLDER, pattern="events.out.tfevents.{}", generation=generation)
        self._start_step = start_step
        self._started = False
        self._is_local = run_dir.is_local
        self._path: str | None = None  # of the growing file
        self._size = 0

    def write(self, records: Sequence[Record]) -> None:
        events = encode_events(records)
        if self._path is not None and self._append(events):
            return
        header = self._header(records[0][2])
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
        events = [Event(wall_time=seconds, file_version="brain.Event:2")]
        if not self._started:
            # START drops everything at its own step and later; the step that was saved is not done again.
            start = SessionLog(status=SessionLog.START)
            events.append(Event(wall_time=seconds, step=self._start_step + 1, session_log=start))
            events.append(Event(wall_time=seconds, summary=layout_summary()))
        return _frame(events)


def encode_events(records: Sequence[Record]) -> bytes:
    """The records as TFRecord-framed events."""
    events = []
    for step, _, seconds, _, values in records:
        event = Event(wall_time=seconds, step=step)
        for name, value in values.items():
            event.summary.value.add(tag=name, simple_value=value)
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
