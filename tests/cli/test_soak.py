"""A short soak: random events with three nodes; ``make soak`` is the long one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.holdings import FEWEST, SPARE, Holding, Watch
from tests.soak import TWICE, draw, soak


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_random_events(tmp_path: Path) -> None:
    """Workers are forked here, so that a new one costs no seconds; in the long one they are new programs."""
    one = soak(tmp_path, num_events=20, seed=3, num_nodes=3, is_forked=True)
    assert one.happened.total() == 20


def test_a_seed_draws_the_same_events() -> None:
    blows = draw(5, num_events=1000, num_nodes=3)
    assert blows == draw(5, num_events=1000, num_nodes=3) != draw(6, num_events=1000, num_nodes=3)
    assert sum(len(one.events) for one in blows) == 1000
    assert sum(len(one.events) == 2 for one in blows) / len(blows) == pytest.approx(TWICE, abs=0.05)
    there = 3
    for event in (event for blow in blows for event in blow.events):
        there += (event.what == "join") - (event.what in ("node killed", "node leaves", "leader killed"))
        assert 1 <= there <= 3, "one is left alone, and there is room for those that come"


@pytest.mark.parametrize("name", ["descriptors", "threads", "images", "heap"])
def test_what_grows_with_each_generation_is_a_leak(name: str, tmp_path: Path) -> None:
    def seen(grows: int) -> list[str]:
        watch = Watch(tmp_path, "none")
        watch._kinds[1] = "worker"
        for generation in range(3 * FEWEST):
            at_times = 3 * (generation % 3 == 1)  # no leak: it goes away again
            values = dict.fromkeys(("descriptors", "threads", "images", "heap"), 100 + at_times)
            values[name] += grows * generation
            watch._seen[1].append((2, Holding(**values)))
            watch._seen[1].append((1, Holding(50, 50, 50, 50)))  # alone, it holds less
        return watch.leaks()

    assert seen(0) == []
    (leak,) = seen(1 if SPARE.get(name, 99) < 9 else 1 << 20)
    assert leak.startswith(f"worker 1 holds more and more {name} over its generations: ")
