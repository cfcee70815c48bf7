"""How fast it goes: rates over a window of time, the time that is left, and the tokens of a batch.

Pure arithmetic on marks that the caller makes; nothing here looks at a clock. Nothing here can fail.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Mark(NamedTuple):
    """Where training stood at a moment."""

    seconds: float  # of any clock that only goes forward
    step: int
    samples: int
    tokens: int


class Throughput:
    """Rates between the oldest and the newest mark of a window.

    Args:
        window: seconds that a mark counts; the newest two always do, however slow the steps are.
    """

    def __init__(self, *, window: float = 30.0) -> None:
        assert window > 0, window
        self._window = window
        self._marks: deque[Mark] = deque()
        self._rates = (0.0, 0.0, 0.0)

    def mark(self, seconds: float, *, step: int, samples: int, tokens: int = 0) -> None:
        """Training stands at ``step`` finished steps, ``samples`` and ``tokens`` used."""
        marks = self._marks
        marks.append(Mark(seconds, step, samples, tokens))
        while len(marks) > 2 and marks[1].seconds <= seconds - self._window:
            marks.popleft()
        first, last = marks[0], marks[-1]
        if (elapsed := last.seconds - first.seconds) > 0:
            steps, samples, tokens = last.step - first.step, last.samples - first.samples, last.tokens - first.tokens
            self._rates = steps / elapsed, samples / elapsed, tokens / elapsed

    def pause(self) -> None:
        """Something else took the time since the last mark: the next one begins a new window.

        Until that has two marks the rates are the last ones.
        """
        self._marks.clear()

    @property
    def steps_per_second(self) -> float:
        """0.0 before the second mark, as are the others."""
        return self._rates[0]

    @property
    def samples_per_second(self) -> float:
        return self._rates[1]

    @property
    def tokens_per_second(self) -> float:
        return self._rates[2]

    def eta(self, num_steps: int) -> float | None:
        """Seconds that ``num_steps`` more steps will take; None where that is not known yet."""
        return num_steps / self._rates[0] if self._rates[0] > 0 else None


_TOKEN_DTYPES = frozenset({torch.int64, torch.int32, torch.int16, torch.uint16, torch.uint32, torch.uint8})


def count_tokens(batch: Any) -> int:
    """Tokens in ``batch``: the elements of the first tensor that looks like token ids, 0 if none does.

    That is an integer tensor of at least two dimensions, (batch, length, …); of bytes, exactly two, because images are
    bytes too. Tuples, lists and mappings are looked through in order, a mapping's ``input_ids`` first.
    """
    if isinstance(batch, Tensor):
        fits = batch.dtype in _TOKEN_DTYPES and batch.dim() >= 2 and (batch.dtype != torch.uint8 or batch.dim() == 2)
        return batch.numel() if fits else 0
    if isinstance(batch, Mapping):
        if "input_ids" in batch and (count := count_tokens(batch["input_ids"])):
            return count
        batch = batch.values()
    elif not isinstance(batch, (tuple, list)):
        return 0
    for part in batch:
        if count := count_tokens(part):
            return count
    return 0
