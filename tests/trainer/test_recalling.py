"""Which snapshots a start may go on from."""

from __future__ import annotations

import pytest

from elastictrain.checkpoint.held import About
from elastictrain.recalling import is_past


@pytest.mark.parametrize(
    ("starts", "is_good"),
    [
        ({}, True),
        ({4: 90}, True),  # a later start that went on from there, or from later: this step is in its past
        ({4: 95}, True),
        ({4: 80}, False),  # it has trained steps 81 to 90 again, on its own
        ({4: 90, 5: 0}, False),
        ({3: 0, 2: 80}, True),  # its own start, and those before
    ],
    ids=str,
)
def test_steps_that_a_later_start_has_trained_again_are_not_the_past(starts: dict[int, int], is_good: bool) -> None:
    snapshot = About("snapshot", 90, 3, "run", "job", 0, 1, 100, {})
    assert is_past(snapshot, run="run", job=None, starts=starts) == is_good
    assert is_past(snapshot, run="run", job="job", starts=starts) == is_good
    assert not is_past(snapshot, run="another run", job=None, starts=starts)
    assert not is_past(snapshot, run="run", job="another job, with --resume never", starts=starts)
