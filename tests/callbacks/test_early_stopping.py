from __future__ import annotations

import json
import math
from typing import Any

import pytest

from elastictrain.callback import ValidationInfo
from elastictrain.callbacks import EarlyStopping
from elastictrain.errors import UsageError


def feed(callback: EarlyStopping, values: list[float], *, start: int = 0) -> list[bool]:
    answers = []
    for step, value in enumerate(values, start=start + 1):
        callback.on_validation_end(
            ValidationInfo(step=step, samples=step, epoch=0, metrics={"val/x": value, "val/y": 0.0})
        )
        answers.append(callback.should_stop())
    return answers


@pytest.mark.parametrize(
    ("arguments", "values", "answers"),
    [
        ({"patience": 2}, [3, 2, 2.5, 1, 1, 1], [False, False, False, False, False, True]),
        ({"patience": 1}, [3, 3], [False, True]),
        ({"patience": 2, "mode": "max"}, [1, 2, 1, 1.5], [False, False, False, True]),
        ({"patience": 2, "min_delta": 0.5}, [3, 2.6, 2.5, 2.4], [False, False, True, False]),
        ({"patience": 2}, [math.nan, math.nan], [False, True]),
        ({"patience": 2}, [1.0, math.nan, 0.5, math.nan, math.inf], [False, False, False, False, True]),
        ({"patience": 2, "mode": "max"}, [-math.inf, 0.0], [False, False]),
    ],
)
def test_when_it_stops(arguments: dict[str, Any], values: list[float], answers: list[bool]) -> None:
    assert feed(EarlyStopping("val/x", **arguments), values) == answers


def test_a_restart_changes_nothing() -> None:
    values = [3, 2, 2.5, 2.1, 2.2, 1.9]
    straight = feed(EarlyStopping("val/x", patience=3), values)
    for cut in range(1, len(values)):
        first, second = EarlyStopping("val/x", patience=3), EarlyStopping("val/x", patience=3)
        answers = feed(first, values[:cut])
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert answers + feed(second, values[cut:], start=cut) == straight


def test_it_says_once_that_training_stops(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        feed(EarlyStopping("val/x", patience=2), [1, 2, 3, 4, 5])
    assert [record.getMessage() for record in caplog.records] == ["val/x has not improved since step 1: training stops"]


def test_an_unknown_metric_is_refused_with_the_closest() -> None:
    with pytest.raises(UsageError, match="logs val/x, val/y; did you mean 'val/x'"):
        feed(EarlyStopping("val/xx"), [1.0])


@pytest.mark.parametrize("arguments", [{"mode": "least"}, {"patience": 0}, {"patience": 1.5}, {"min_delta": -1}])
def test_bad_arguments_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"EarlyStopping.{next(iter(arguments))}="):
        EarlyStopping("val/x", **arguments)
