"""The lines of ``metrics/``, whole, as tests look at them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from elastictrain.metrics.lines import parse, read_objects
from elastictrain.metrics.record import FIELDS, FOLDER, LOOSE
from elastictrain.rundir import RunDir


def read_records(run_dir: RunDir, *, replayed: bool = False) -> list[dict[str, Any]]:
    """All lines of ``metrics/``, in the order of steps.

    Args:
        replayed: keep the lines of steps that were rolled back and done again, not only the later ones.

    A line that was cut by a crash while it was written is left out.
    """
    lines: list[dict[str, Any]] = []
    names = [name for name in run_dir.names(FOLDER) if name.endswith(".jsonl")]
    for _, data in read_objects(run_dir, FOLDER, names):
        for line in parse_lines(data):
            if not replayed:
                _drop_replaced(lines, line)
            lines.append(line)
    return lines


def parse_lines(data: bytes) -> Iterator[dict[str, Any]]:
    """The lines of one object of ``metrics/``, numbers as floats; one that was cut is left out."""
    for line in parse(data)[0]:
        yield {key: LOOSE.get(value, value) if isinstance(value, str) else value for key, value in line.items()}


def _drop_replaced(lines: list[dict[str, Any]], new: Mapping[str, Any]) -> None:
    """Take out what was done again by the time ``new`` was written."""
    while lines and lines[-1]["step"] > new["step"]:
        lines.pop()
    same = list(itertools.takewhile(lambda line: line["step"] == new["step"], reversed(lines)))
    # Training and validation log at the same step; a name that comes twice says that the step does.
    if any(line["generation"] != new["generation"] or (line.keys() & new.keys()) - set(FIELDS) for line in same):
        del lines[-len(same) :]
