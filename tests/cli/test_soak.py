"""A short soak: random events with three nodes; ``make soak`` is the long one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.soak import soak


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_random_events(tmp_path: Path) -> None:
    assert soak(tmp_path, num_events=6, seed=3, num_nodes=3).happened
