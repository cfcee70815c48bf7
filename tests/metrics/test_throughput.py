from __future__ import annotations

from typing import Any

import pytest
import torch

from elastictrain.metrics.throughput import Throughput, count_tokens


def test_rates_are_those_of_the_window() -> None:
    rates = Throughput(window=10.0)
    assert (rates.steps_per_second, rates.eta(5)) == (0.0, None)
    rates.mark(100.0, step=10, samples=80)
    assert (rates.samples_per_second, rates.eta(5)) == (0.0, None)
    for second in range(1, 31):
        rates.mark(100.0 + second, step=10 + 2 * second, samples=80 + 16 * second, tokens=160 * second)
    assert (rates.steps_per_second, rates.samples_per_second, rates.tokens_per_second) == (2.0, 16.0, 160.0)
    assert rates.eta(7) == 3.5
    for second in range(31, 41):  # ten seconds at half the speed: the faster ones are forgotten
        rates.mark(100.0 + second, step=70 + second - 30, samples=560 + 8 * (second - 30), tokens=4800)
    assert (rates.steps_per_second, rates.samples_per_second, rates.tokens_per_second) == (1.0, 8.0, 0.0)


def test_steps_slower_than_the_window_still_count() -> None:
    rates = Throughput(window=1.0)
    for step in range(4):
        rates.mark(50.0 * step, step=step, samples=100 * step)
    assert rates.samples_per_second == 2.0


def test_a_pause_takes_no_time() -> None:
    rates = Throughput(window=100.0)
    rates.mark(0.0, step=0, samples=0)
    rates.mark(10.0, step=10, samples=80)
    rates.pause()
    assert rates.samples_per_second == 8.0
    rates.mark(60.0, step=11, samples=88)
    assert rates.samples_per_second == 8.0
    rates.mark(61.0, step=15, samples=120)
    assert rates.samples_per_second == 32.0


def test_no_time_between_marks_is_no_rate() -> None:
    rates = Throughput()
    rates.mark(1.0, step=1, samples=1)
    rates.mark(1.0, step=2, samples=2)
    assert rates.samples_per_second == 0.0


IDS = torch.zeros(4, 16, dtype=torch.int64)


@pytest.mark.parametrize(
    ("batch", "tokens"),
    [
        (IDS, 64),
        ((IDS, IDS), 64),
        ([torch.zeros(4, 8), {"x": IDS.int()}], 64),
        ({"labels": IDS[:, :8], "input_ids": IDS}, 64),
        ({"attention": torch.ones(4, 16, dtype=torch.bool), "ids": IDS}, 64),
        ({"input_ids": None, "ids": IDS}, 64),
        (torch.zeros(4, 16, dtype=torch.uint8), 64),
        (torch.zeros(4, 3, 8, 8, dtype=torch.uint8), 0),
        ((torch.zeros(4, 3, 8, 8), torch.zeros(4, dtype=torch.int64)), 0),
        ("text", 0),
        ([], 0),
        (None, 0),
        (torch.zeros(0, 16, dtype=torch.int64), 0),
    ],
)
def test_tokens_of_a_batch(batch: Any, tokens: int) -> None:
    assert count_tokens(batch) == tokens
