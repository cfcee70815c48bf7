"""``python -m tests.elastic.many_worlds FIRST LAST``: the worlds of these seeds, what happened in them, and which failed."""

from __future__ import annotations

import sys
import time

from tests.elastic.world import World


def main() -> None:
    first, last = int(sys.argv[1]), int(sys.argv[2])
    start = time.process_time()
    events = entries = epochs = fenced = 0
    failed: list[int] = []
    for seed in range(first, last):
        try:
            world = World(seed).run()
        except AssertionError as error:
            failed.append(seed)
            if len(failed) < 4:
                print(f"seed {seed}: {str(error)[:1500]}")
            continue
        events, fenced = events + world.num_events, fenced + world.num_fenced
        entries, epochs = entries + world.log[-1].index, epochs + world.log[-1].epoch
    print(f"{last - first} seeds, {events} events, {entries} entries, {epochs} epochs, {fenced} leaders fenced,"
          f" {len(failed)} failed {failed[:20]}, {time.process_time() - start:.1f} s")  # fmt: skip


if __name__ == "__main__":
    main()
