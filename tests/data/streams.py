"""What the tests of streams share: files with known records, and ranks that take turns in one process."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from elastictrain.data.slots import SlotPlan
from elastictrain.data.stream import SampleStream
from elastictrain.data.stream_feed import StreamFeed

Row = dict[int, list[Any]]  # of one step: slot -> its batch


def write_jsonl(folder: Path, counts: Sequence[int], *, seed: int = 0) -> list[str]:
    """Files of records ``{"id": n, "pad": "…"}`` of uneven length; ids count through all files."""
    draw = random.Random(seed)
    names, number = [], 0
    for file, count in enumerate(counts):
        rows = []
        for _ in range(count):
            rows.append(json.dumps({"id": number, "pad": "é" * draw.randrange(40)}, ensure_ascii=False))
            number += 1
        path = folder / f"part-{file:03}.jsonl"
        path.write_text("\n".join(rows) + ("\n" if file % 2 else ""), encoding="utf-8")
        names.append(str(path))
    return names


def as_list(samples: list[Any]) -> list[Any]:
    return samples


class Ranks:
    """The ranks of one generation, each with a feed of its own, reading in turns."""

    def __init__(
        self,
        make: Callable[[], SampleStream],
        plan: SlotPlan,
        size: int,
        *,
        num_workers: int = 0,
        state: Mapping[str, Any] | None = None,
        seed: int = 7,
        collate_fn: Callable[[list[Any]], Any] = as_list,
    ) -> None:
        self.feeds = [
            StreamFeed(make(), plan, seed=seed, num_workers=num_workers, collate_fn=collate_fn) for _ in range(size)
        ]
        for rank, feed in enumerate(self.feeds):
            if state is not None:
                feed.load_state(state)
            feed.start(dp_rank=rank, dp_size=size)
        self._epochs = [feed.epoch() for feed in self.feeds]

    def step(self, *, commit: bool = True) -> Row:
        """One step of all ranks."""
        row: Row = {}
        works = [next(epoch) for epoch in self._epochs]
        for work in works:
            for slot in work.slots:
                assert slot.batch_idx == work.step_in_epoch * work.num_slots + slot.index
                assert slot.index not in row, "two ranks read one slot"
                assert slot.size == len(slot.batch or ())
                row[slot.index] = slot.batch
        if commit:
            for feed, work in zip(self.feeds, works, strict=True):
                feed.commit(work)
        return {slot: row[slot] for slot in sorted(row)}

    def pass_(self) -> list[Row]:
        """The rest of the epoch, to the first step in which no slot has anything."""
        rows = []
        while any((row := self.step()).values()):
            rows.append(row)
        for feed in self.feeds:
            feed.end_epoch()
        self._epochs = [feed.epoch() for feed in self.feeds]
        return rows

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, as it comes back from storage."""
        shared = [feed.state() for feed in self.feeds]
        assert all(state == shared[0] for state in shared), "state() differs between ranks"
        merged: dict[str, Any] = dict(shared[0])
        for feed in self.feeds:
            local = feed.local_state()
            assert not merged.keys() & local.keys(), "two ranks keep one shard"
            merged.update(local)
        result: dict[str, Any] = json.loads(json.dumps(merged))
        return result

    def close(self) -> None:
        for feed in self.feeds:
            feed.close()


def chain(
    make: Callable[[], SampleStream], plan: SlotPlan, hops: Sequence[tuple[int, int]], *, num_workers: int = 0
) -> tuple[list[Row], dict[str, Any]]:
    """The steps of a run that goes through ``(ranks, steps)``, with reading ahead before every hop; and its state."""
    rows: list[Row] = []
    state: dict[str, Any] | None = None
    for size, steps in hops:
        ranks = Ranks(make, plan, size, num_workers=num_workers, state=state)
        rows += [ranks.step() for _ in range(steps)]
        ranks.step(commit=False)  # read ahead, never used
        state = ranks.state()
        ranks.close()
    assert state is not None
    return rows, state


def flat(rows: Sequence[Row]) -> list[Any]:
    return [sample for row in rows for batch in row.values() for sample in batch or ()]
