"""The Gantt chart of a run as an image: nodes × time, coloured by cause, for places that show nothing but pixels.

TensorBoard shows an image in a panel of about 320 pixels: it is drawn for twice that, in letters of twice their size. There
is no library of images among the dependencies, and rectangles and letters of 5 × 8 pixels need none.

On failure: nothing here can fail; a run of which nothing is known yet is an empty chart.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from elastictrain.metrics.console import format_percent, format_seconds
from elastictrain.metrics.goodput import CAUSES
from elastictrain.metrics.timeline import COLORS, Row, Timeline, columns, shares_below, timeline

Pixels = npt.NDArray[np.uint8]  # (height, width, 3)

_WIDTH = 640
_MAX_ROWS = 24
_SCALE = 2  # of a letter
_LETTER = 6 * _SCALE, 9 * _SCALE  # with the space to the next one
_ROW, _GAP = 30, 6
_INK, _FAINT, _PAPER, _EMPTY = "#20242c", "#c9ced6", "#ffffff", "#eef0f3"
_PLANNED = "#8a5a00"  # of changes in good order


def gantt_png(lines: Iterable[Mapping[str, Any]]) -> bytes:
    """The lines of a ledger as a PNG file; its size is that of :func:`gantt_image`."""
    return encode_png(gantt_image(lines))


def gantt_image(lines: Iterable[Mapping[str, Any]]) -> Pixels:
    """The lines of a ledger as RGB: uint8, (height, 640, 3). The height goes with the number of nodes, up to 24 rows."""
    run = timeline(lines)
    rows = rows_to_draw(run, limit=_MAX_ROWS)
    label = min(max([len(name) for name, _ in rows] + [4]), 14)
    left, right, top = label * _LETTER[0] + 10, _WIDTH - 12, _LETTER[1] + 10
    bottom = top + max(1, len(rows)) * (_ROW + _GAP)
    total = columns(run.rows, begin=run.begin, end=run.end, num=1)[0]
    legend = [
        (cause, f"{cause} {format_percent(100 * s / total.sum())}")
        for cause, s in zip(CAUSES, total, strict=True)
        if s > 0
    ]
    per_line = 2
    height = bottom + 2 * _LETTER[1] + 16 + (_LETTER[1] + 6) * -(-len(legend) // per_line)
    image = np.empty((height, _WIDTH, 3), np.uint8)
    image[:] = _rgb(_PAPER)
    for number, (name, group) in enumerate(rows):
        y = top + number * (_ROW + _GAP)
        _write(image, 4, y + (_ROW - _LETTER[1]) // 2 + _SCALE, _shortened(name, label))
        image[y : y + _ROW, left:right] = _stacked(run, group, width=right - left)
    _draw_axis(image, run, left=left, right=right, top=top, bottom=bottom)
    _draw_marks(image, run, left=left, right=right, top=top, bottom=bottom)
    y = bottom + 2 * _LETTER[1] + 12
    for number, (cause, text) in enumerate(legend):
        line, column = divmod(number, per_line)
        at = 4 + column * (_WIDTH // per_line), y + line * (_LETTER[1] + 6)
        image[at[1] : at[1] + 7 * _SCALE, at[0] : at[0] + 7 * _SCALE] = _rgb(COLORS[cause])
        _write(image, at[0] + 10 * _SCALE, at[1], text)
    return image


def rows_to_draw(run: Timeline, *, limit: int) -> list[tuple[str, tuple[Row, ...]]]:
    """The nodes of a run by label; where there are more than ``limit``, those that are too many share the last row."""
    if len(run.rows) <= limit:
        return [(row.label, (row,)) for row in run.rows]
    rest = run.rows[limit - 1 :]
    return [*((row.label, (row,)) for row in run.rows[: limit - 1]), (f"{len(rest)} more", rest)]


def ticks(length: float, *, num: int) -> list[float]:
    """Up to ``num`` + 1 round times from 0 to ``length``, in seconds."""
    steps = [s * unit for unit in (1, 60) for s in (1, 2, 5, 10, 15, 30)] + [h * 3600 for h in (1, 2, 3, 6, 12)]
    steps += [day * 86400 * 10**power for power in range(6) for day in (1, 2, 5)]
    step = next((s for s in steps if length / s <= num), None) or length / num
    return [i * step for i in range(int(length / step) + 1)]


def _stacked(run: Timeline, group: tuple[Row, ...], *, width: int) -> Pixels:
    """A row: each column of pixels is filled, from below, with the shares of its time. Where nobody was, it is empty."""
    seconds = columns(group, begin=run.begin, end=run.end, num=width)
    share = shares_below(seconds, full=max(run.end - run.begin, 1e-9) / width * len(group))
    heights = np.arange(_ROW)[::-1, None, None] + 0.5
    number = (share[None] * _ROW <= heights).sum(axis=2)  # (rows of pixels, columns): which cause, or none
    palette = np.array([_rgb(COLORS[cause]) for cause in CAUSES] + [_rgb(_EMPTY)], np.uint8)
    pixels: Pixels = palette[number]
    return pixels


def _draw_axis(image: Pixels, run: Timeline, *, left: int, right: int, top: int, bottom: int) -> None:
    length = max(run.end - run.begin, 1e-9)
    free = 0
    for tick in ticks(length, num=5):
        x = left + round((right - 1 - left) * tick / length)
        image[bottom : bottom + 5, x : x + 2] = _rgb(_INK)
        text = format_seconds(tick) if tick else "0"
        at = min(x - len(text) * _LETTER[0] // 2, _WIDTH - len(text) * _LETTER[0])
        if at >= free:
            _write(image, at, bottom + 8, text)
            free = at + (len(text) + 1) * _LETTER[0]


def _draw_marks(image: Pixels, run: Timeline, *, left: int, right: int, top: int, bottom: int) -> None:
    """Where generations begin a line, with its number where there is room; below, saves; above, failures and changes."""
    length = max(run.end - run.begin, 1e-9)
    free = left
    for mark in run.marks:
        x = left + round((right - 2 - left) * (mark.time - run.begin) / length)
        if mark.kind == "start":
            image[top - 4 : bottom, x : x + 2] = _rgb(_INK)
            text = f"g{mark.generation}"
            at = min(x, _WIDTH - len(text) * _LETTER[0])
            if at >= free:
                _write(image, at, 2, text)
                free = at + (len(text) + 1) * _LETTER[0]
        elif mark.kind == "checkpoint":
            image[bottom - _GAP + 1 : bottom - 1, x : x + 3] = _rgb(COLORS["checkpoint"])
        elif mark.kind in ("recovery", "change"):
            for i in range(7):  # a triangle that points down
                color = COLORS["detect"] if mark.kind == "recovery" else _PLANNED
                image[top - 10 + i, max(left, x - 6 + i) : x + 8 - i] = _rgb(color)


def _shortened(text: str, length: int) -> str:
    """The end of a host's name tells it from the others."""
    return text if len(text) <= length else ".." + text[-(length - 2) :]


def _rgb(color: str) -> tuple[int, int, int]:
    return int(color[1:3], 16), int(color[3:5], 16), int(color[5:7], 16)


# ---- PNG -----------------------------------------------------------------------------------------------------------


def encode_png(image: Pixels) -> bytes:
    """uint8 (height, width, 3) as a PNG file (W3C PNG, third edition: signature, IHDR, IDAT, IEND; 8 bits, RGB)."""
    height, width, _ = image.shape
    rows = np.zeros((height, 1 + 3 * width), np.uint8)  # each with its filter's number before it: none
    rows[:, 1:] = image.reshape(height, 3 * width)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = [(b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes(), 6)), (b"IEND", b"")]
    framed = [struct.pack(">I", len(d)) + k + d + struct.pack(">I", zlib.crc32(k + d)) for k, d in parts]
    return b"\x89PNG\r\n\x1a\n" + b"".join(framed)


# ---- letters -------------------------------------------------------------------------------------------------------

# Eight rows of five pixels each, from the top, two hex digits a row; what is left out at the end is empty.
_GLYPHS = {
    "A": "0e11111f111111", "B": "1e11111e11111e", "C": "0e11101010110e", "D": "1e11111111111e", "E": "1f10101e10101f",
    "F": "1f10101e101010", "G": "0e11101711110f", "H": "1111111f111111", "I": "0e04040404040e", "J": "0702020202120c",
    "K": "11121418141211", "L": "1010101010101f", "M": "111b1515111111", "N": "11191513111111", "O": "0e11111111110e",
    "P": "1e11111e101010", "Q": "0e11111115120d", "R": "1e11111e141211", "S": "0f10100e01011e", "T": "1f040404040404",
    "U": "1111111111110e", "V": "11111111110a04", "W": "11111115151b11", "X": "11110a040a1111", "Y": "11110a04040404",
    "Z": "1f01020408101f", "0": "0e11131519110e", "1": "040c040404040e", "2": "0e11010608101f", "3": "0e11010601110e",
    "4": "02060a121f0202", "5": "1f101e0101110e", "6": "0608101e11110e", "7": "1f010204080808", "8": "0e11110e11110e",
    "9": "0e11110f01020c", "a": "00000e010f110f", "b": "10101e1111111e", "c": "00000f1010100f", "d": "01010f1111110f",
    "e": "00000e111f100e", "f": "06081c08080808", "g": "00000f11110f010e", "h": "10101e11111111", "i": "04000c0404040e",
    "j": "020006020202120c", "k": "10101214181412", "l": "0c04040404040e", "m": "00001a15151515", "n": "00001e11111111",
    "o": "00000e1111110e", "p": "00001e11111e1010", "q": "00000f11110f0101", "r": "00001618101010", "s": "00000f100e011e",
    "t": "08081c08080806", "u": "0000111111110f", "v": "00001111110a04", "w": "0000111115150a", "x": "0000110a040a11",
    "y": "00001111110f010e", "z": "00001f0204081f", " ": "", ".": "00000000000c0c", ",": "00000000000c0408",
    ":": "000c0c000c0c", "-": "0000001f", "+": "0004041f0404", "%": "18190204081303", "/": "01010204081010",
    "(": "02040808080402", ")": "08040202020408", "_": "000000000000001f", "=": "00001f001f", "#": "0a0a1f0a1f0a0a",
    "<": "02040810080402", ">": "08040201020408",
}  # fmt: skip
_OTHER = "1f11111111111f"


def _write(image: Pixels, x: int, y: int, text: str) -> None:
    """Draw letters with their upper left corner at (x, y); what leaves the image is cut off."""
    x, ink = max(x, 0), _rgb(_INK)
    for letter in text:
        rows = bytes.fromhex(_GLYPHS.get(letter, _OTHER))
        dots = np.array([[row >> bit & 1 for bit in (4, 3, 2, 1, 0)] for row in rows], bool).reshape(len(rows), 5)
        dots = dots.repeat(_SCALE, axis=0).repeat(_SCALE, axis=1)
        part = image[y : y + dots.shape[0], x : x + dots.shape[1]]
        part[dots[: part.shape[0], : part.shape[1]]] = ink
        x += _LETTER[0]
