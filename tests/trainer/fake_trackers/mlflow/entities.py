from __future__ import annotations

from typing import Any, NamedTuple


class Metric(NamedTuple):
    key: str
    value: float
    timestamp: int
    step: int


class Param(NamedTuple):
    key: str
    value: Any
