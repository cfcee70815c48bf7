"""Streams as global batches: the same samples whoever reads them, each exactly once."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from elastictrain.data import SampleStream, files
from elastictrain.data.slots import Feed, SlotPlan
from elastictrain.data.stream_feed import StreamFeed
from elastictrain.errors import CheckpointError, UsageError
from tests.data.streams import Ranks, as_list, chain, flat, write_jsonl

PLAN = SlotPlan(24, 5)  # five slots, the last of four samples
COUNTS = [130, 1, 71, 0, 90, 44, 160, 3]
TOTAL = sum(COUNTS)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MIN_PIECE", 600)


@pytest.fixture
def names(tmp_path: Path) -> list[str]:
    return write_jsonl(tmp_path, COUNTS)


def ids(names: list[str], **options: Any) -> SampleStream:
    return SampleStream.jsonl(names, field="id", **options)


@pytest.mark.parametrize("num_shards", [None, 13])
def test_same_samples_on_any_number_of_ranks_each_once(names: list[str], num_shards: int | None) -> None:
    def make() -> SampleStream:
        return ids(names, num_shards=num_shards)

    one = Ranks(make, PLAN, 1)
    passes = [one.pass_(), one.pass_()]
    for rows in passes:
        assert sorted(flat(rows)) == list(range(TOTAL))
        assert all(len(row) == 5 for row in rows)
        assert [len(batch or ()) for batch in rows[0].values()] == [5, 5, 5, 5, 4]
        sizes = [sum(len(batch or ()) for batch in row.values()) for row in rows]
        assert 0 < sizes[-1] < 24  # a ragged end
        assert sizes == sorted(sizes, reverse=True)
    assert passes[0] != passes[1]  # another order in the next pass
    for size in (2, 3, 4, 5, 7):  # seven: two ranks have no slot
        ranks = Ranks(make, PLAN, size)
        assert [ranks.pass_(), ranks.pass_()] == passes


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("repeat", [False, True])
def test_a_run_through_many_worlds_is_the_run_that_never_stopped(
    names: list[str], num_workers: int, repeat: bool
) -> None:
    def make() -> SampleStream:
        return ids(names, num_shards=13, repeat=repeat)

    hops = [(4, 3), (3, 4), (1, 2), (5, 5), (2, 3)]
    rows, state = chain(make, PLAN, hops, num_workers=num_workers)
    whole = Ranks(make, PLAN, 1)
    assert rows == [whole.step() for _ in rows]
    last = Ranks(make, PLAN, 3, state=state, num_workers=num_workers)
    if repeat:
        assert [last.step() for _ in range(40)] == [whole.step() for _ in range(40)]
        assert all(sum(len(batch or ()) for batch in row.values()) == 24 for row in rows)
    else:
        rest = last.pass_()
        assert rest == whole.pass_()
        assert sorted(flat(rows + rest)) == list(range(TOTAL))  # exactly once
        assert last.step() == whole.step()  # the next pass
    last.close()


def test_repeated_shards_wrap_on_their_own_in_another_order(names: list[str]) -> None:
    ranks = Ranks(lambda: ids(names, num_shards=5, repeat=True), PLAN, 2)
    seen: dict[int, list[int]] = {slot: [] for slot in range(5)}
    for _ in range(80):
        for slot, batch in ranks.step().items():
            assert batch is not None
            seen[slot] += batch
    for samples in seen.values():  # a slot's only shard, pass after pass
        size = len(set(samples))
        passes = [samples[i : i + size] for i in range(0, len(samples) - size + 1, size)]
        assert len(passes) >= 2
        assert all(sorted(each) == sorted(passes[0]) for each in passes)
        assert passes[0] != passes[1]
    assert sum(len(set(samples)) for samples in seen.values()) == TOTAL


def test_shards_of_a_slot_take_turns_also_where_one_is_shorter(tmp_path: Path) -> None:
    for shard, count in enumerate([3, 40]):
        (tmp_path / f"{shard}.txt").write_text("".join(f"{shard}:{i}\n" for i in range(count)))
    stream = SampleStream.text(f"{tmp_path}/*", each="file", num_shards=2, repeat=True)
    ranks = Ranks(lambda: stream.packed(4, tokenize=str.encode), SlotPlan(6, 6), 1)
    rows = [[bytes(row).decode() for row in batch or ()] for batch in (ranks.step()[0] for _ in range(20))]
    assert [sum(row.startswith("0:") for row in batch) for batch in rows] == [3] * 20


def test_without_shuffle_every_pass_is_in_order(names: list[str]) -> None:
    ranks = Ranks(lambda: ids(names, shuffle=False), SlotPlan(4, 4), 1)
    assert flat(ranks.pass_()) == list(range(TOTAL))
    assert flat(ranks.pass_()) == list(range(TOTAL))


def test_order_follows_the_trainers_seed_unless_the_stream_has_one(names: list[str]) -> None:
    def first(trainer_seed: int, **options: Any) -> Any:
        return Ranks(lambda: ids(names, **options), PLAN, 1, seed=trainer_seed).step()

    assert first(1) == first(1)
    assert first(1) != first(2)
    assert first(1, seed=3) == first(2, seed=3)


def test_a_run_may_go_on_with_other_slots(names: list[str]) -> None:
    rows, state = chain(lambda: ids(names, num_shards=13), PLAN, [(2, 6)])
    other = Ranks(lambda: ids(names), SlotPlan(30, 3), 3, state=state)  # ten slots; num_shards is remembered
    assert sorted(flat(rows + other.pass_())) == list(range(TOTAL))
    with pytest.raises(
        UsageError, match=r"the stream has 13 shards and the run 14 slots .* raise --micro-batch-size to 2"
    ):
        Ranks(lambda: ids(names), SlotPlan(14, 1), 1, state=state)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_what_was_read_ahead_is_read_again(names: list[str], num_workers: int) -> None:
    ranks = Ranks(lambda: ids(names), PLAN, 2, num_workers=num_workers)
    used = [ranks.step()]
    position = ranks.state()
    ahead = [ranks.step(commit=False) for _ in range(3)]
    assert ranks.state() == position
    again = Ranks(lambda: ids(names), PLAN, 2, state=position, num_workers=num_workers)
    assert [again.step() for _ in range(3)] == ahead
    assert len(set(flat(used + ahead))) == 4 * 24
    ranks.close()
    again.close()


def draws(sample: Any) -> tuple[Any, float, float, float]:
    return sample, random.random(), float(np.random.rand()), float(torch.rand(()))


def test_random_transforms_draw_the_same_in_any_layout(names: list[str]) -> None:
    def make() -> SampleStream:
        return ids(names, num_shards=13, transform=draws)

    one = Ranks(make, PLAN, 1)
    want = [one.step() for _ in range(8)]
    assert len({sample[1] for sample in flat(want)}) == 8 * 24  # and samples do not share numbers
    for num_workers in (0, 2):
        rows, _ = chain(make, PLAN, [(3, 3), (1, 2), (2, 3)], num_workers=num_workers)
        assert rows == want


def test_loader_processes_leave_the_generators_of_training_alone(names: list[str]) -> None:
    torch.manual_seed(9)
    want = float(torch.rand(()))
    torch.manual_seed(9)
    ranks = Ranks(lambda: ids(names), PLAN, 1, num_workers=1)
    ranks.step()
    ranks.close()
    assert float(torch.rand(())) == want


def test_batches_are_collated_and_work_says_what_it_knows(names: list[str]) -> None:
    feed: Feed = StreamFeed(ids(names), PLAN, seed=0, num_workers=0)
    feed.start(dp_rank=1, dp_size=2)
    work = next(feed.epoch())
    slots = list(work.slots)
    assert [slot.index for slot in slots] == [1, 3]
    assert slots[0].batch.shape == (5,)
    assert slots[0].batch.dtype == torch.int64
    assert (work.num_slots, work.num_samples, work.is_last, work.epoch) == (5, None, False, 0)
    feed = StreamFeed(ids(names, repeat=True), PLAN, seed=0, num_workers=0)
    feed.start(dp_rank=0, dp_size=1)
    assert next(feed.epoch()).num_samples == 24
    assert feed.steps_per_epoch is None
    assert feed.slots_per_epoch is None


def fails_at_300(sample: int) -> int:
    if sample == 300:
        raise KeyError("no such label")
    return sample


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_error_in_user_code_comes_through(names: list[str], num_workers: int) -> None:
    ranks = Ranks(lambda: ids(names, transform=fails_at_300), PLAN, 1, num_workers=num_workers)
    with pytest.raises(KeyError) as error:
        ranks.pass_()
    assert "no such label" in str(error.value)
    if num_workers:
        assert "fails_at_300" in str(error.value)  # the traceback of the loader process
    ranks.close()


def test_a_killed_loader_process_raises(names: list[str]) -> None:
    before = set(multiprocessing.active_children())
    ranks = Ranks(lambda: ids(names, repeat=True), PLAN, 1, num_workers=2)
    ranks.step()
    loaders = [child for child in multiprocessing.active_children() if child not in before]
    assert len(loaders) == 2
    assert loaders[0].pid is not None
    os.kill(loaders[0].pid, signal.SIGKILL)
    begun = time.monotonic()
    with pytest.raises(RuntimeError, match=r"DataLoader worker \(pid"):
        for _ in range(100):
            ranks.step()
    assert time.monotonic() - begun < 60
    ranks.close()
    del ranks
    loaders[1].join(timeout=60)
    assert not loaders[1].is_alive()


@pytest.mark.slow
def test_loader_processes_outlive_the_signals_that_ask_a_run_to_stop(names: list[str]) -> None:
    before = set(multiprocessing.active_children())
    ranks = Ranks(lambda: ids(names, repeat=True), PLAN, 1, num_workers=2)
    rows = [ranks.step()]
    loaders = [child for child in multiprocessing.active_children() if child not in before]
    for child in loaders:  # from a stranger, as a scheduler would
        for number in (signal.SIGINT, signal.SIGTERM):
            subprocess.run(["/bin/sh", "-c", f"kill -{number:d} {child.pid}"], check=True)
    rows += [ranks.step() for _ in range(20)]
    want = Ranks(lambda: ids(names, repeat=True), PLAN, 1)
    assert rows == [want.step() for _ in rows]
    ranks.close()
    for child in loaders:
        child.join(timeout=60)
        assert child.exitcode == 0


def test_loader_processes_end_when_their_parent_ends_them(names: list[str]) -> None:
    before = set(multiprocessing.active_children())
    ranks = Ranks(lambda: ids(names, repeat=True), PLAN, 1, num_workers=2)
    ranks.step()
    for child in set(multiprocessing.active_children()) - before:  # what multiprocessing does when a process exits
        child.terminate()
        child.join(timeout=60)
        assert child.exitcode == 0
    ranks.close()


def test_a_process_that_leaves_its_loader_open_ends(names: list[str]) -> None:
    def leave() -> None:
        ranks = Ranks(lambda: ids(names, repeat=True), PLAN, 1, num_workers=2)
        ranks.step()
        left.append(ranks)

    left: list[Ranks] = []
    process = multiprocessing.get_context("fork").Process(target=leave)
    process.start()
    process.join(timeout=60)
    still = process.is_alive()
    process.kill()
    assert not still
    assert process.exitcode == 0


def test_positions_of_something_else_are_refused(names: list[str], tmp_path: Path) -> None:
    _, state = chain(lambda: ids(names, num_shards=13), PLAN, [(2, 2)])

    def refused(stream: SampleStream, values: dict[str, Any]) -> str:
        with pytest.raises(CheckpointError) as error:
            StreamFeed(stream, PLAN, seed=7, num_workers=0).load_state(values)
        assert "\n" not in str(error.value)
        return str(error.value)

    assert "num_shards=13 in the checkpoint and 12 now" in refused(ids(names, num_shards=12), state)
    assert "repeat=False in the checkpoint and True now" in refused(ids(names, repeat=True), state)
    assert "shuffle=True in the checkpoint and False now" in refused(ids(names, shuffle=False), state)
    assert "seed=7 in the checkpoint and 8 now" in refused(ids(names, seed=8), state)
    assert "kind='jsonl' in the checkpoint and 'text' now" in refused(SampleStream.text(names), state)
    assert "files=8 in the checkpoint and 7 now" in refused(ids(names[:-1]), {**state})
    assert "of kind 'map'" in refused(ids(names), {"data.kind": "map"})
    partial = {name: value for name, value in state.items() if name != "data.stream.4"}
    assert "lacks 1 of 13 shard positions, data.stream.4 the first" in refused(ids(names), partial)
    rows = Path(names[0]).read_text().splitlines()
    Path(names[0]).write_text("\n".join([rows[1], rows[0], *rows[2:], rows[0]]))
    assert "bytes=" in refused(ids(names), state)
    # the same data at another place is the same data
    elsewhere = tmp_path / "moved"
    elsewhere.mkdir()
    _, state = chain(lambda: ids(names, num_shards=13), PLAN, [(2, 2)])
    moved = [str(Path(name).rename(elsewhere / Path(name).name)) for name in names]
    StreamFeed(ids(moved), PLAN, seed=7, num_workers=0).load_state(state)


def test_what_cannot_be_resumed_or_shared_is_refused(names: list[str], tmp_path: Path) -> None:
    def refused(make: Any) -> str:
        with pytest.raises(UsageError) as error:
            make()
        assert "\n" not in str(error.value)
        return str(error.value)

    assert "shuffle=1000 asks for a shuffle buffer, which cannot be resumed exactly" in refused(
        lambda: ids(names, shuffle=1000)
    )
    assert "num_shards=0 must be at least 1" in refused(lambda: ids(names, num_shards=0))
    assert "takes a Source, not a list" in refused(lambda: SampleStream(names))  # type: ignore[arg-type]
    few = refused(lambda: StreamFeed(ids(names, num_shards=4), PLAN, seed=0, num_workers=0))
    assert few == (
        "the stream has 4 shards and the run 5 slots (global batch 24 in microbatches of 5): raise --micro-batch-size"
        " to 6, or give the stream num_shards=5 when a run begins"
    )
    whole = SampleStream.text(names[:3], each="file")
    assert "at most 3 shards and 5 are asked for: raise --micro-batch-size" in refused(
        lambda: StreamFeed(whole, PLAN, seed=0, num_workers=0)
    )
    assert "at most 3 shards and 4 are asked for: lower num_shards" in refused(
        lambda: SampleStream.text(names[:3], each="file", num_shards=4)
    )
    assert "each='word' must be" in refused(lambda: SampleStream.text(names, each="word"))
    tiny = tmp_path / "tiny.txt"
    tiny.write_text("only\n")
    assert "have no samples, and repeat=True needs some in each" in refused(
        Ranks(lambda: SampleStream.text(str(tiny), repeat=True), PLAN, 1).step
    )


def test_misuse_by_the_trainer_is_noticed(names: list[str]) -> None:
    feed = StreamFeed(ids(names), PLAN, seed=0, num_workers=0)
    with pytest.raises(AssertionError, match="start"):
        next(feed.epoch())
    feed.start(dp_rank=0, dp_size=2)
    works = feed.epoch()
    work = next(works)
    next(work.slots)
    with pytest.raises(AssertionError, match=r"slots \[2, 4\] were not read"):
        feed.commit(work)
    later = next(works)
    with pytest.raises(AssertionError, match="slot 2 is read at step 1, and stands at 0"):
        list(later.slots)
    list(work.slots)
    feed.commit(work)
    with pytest.raises(AssertionError, match="load_state"):
        feed.start(dp_rank=1, dp_size=2)


def test_a_stream_is_a_plain_iterable_dataset_too(names: list[str]) -> None:
    stream = ids(names, num_shards=6)
    first = list(stream)
    assert sorted(first) == list(range(TOTAL))
    assert list(stream) == first
    stream.set_epoch(1)
    assert sorted(stream) == sorted(first)
    assert list(stream) != first
    for num_workers, num_shards in [(2, 6), (2, None), (2, 1)]:
        loader = DataLoader(
            ids(names, num_shards=num_shards), batch_size=10, num_workers=num_workers, collate_fn=as_list
        )
        assert sorted(sample for batch in loader for sample in batch) == list(range(TOTAL))


def test_it_trains_under_lightning(names: list[str], tmp_path: Path) -> None:
    import lightning

    from elastictrain.task import Task

    class Sums(Task):
        batch_size = 10

        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)
            self.seen: list[int] = []

        def train_dataset(self) -> SampleStream:
            return ids(names)

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            self.seen += batch.tolist()
            return self.layer(batch.float()[:, None]).mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=1e-9)

    task = Sums()
    lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    ).fit(task)
    assert sorted(task.seen) == list(range(TOTAL))


@pytest.mark.slow
def test_streams_from_an_object_store(s3_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import s3fs

    monkeypatch.setattr(files, "MIN_PIECE", 3000)
    store = s3fs.S3FileSystem()
    for name in write_jsonl(tmp_path, [200, 50, 120]):
        store.put(name, f"{s3_url.removeprefix('s3://')}/{Path(name).name}")

    def make() -> SampleStream:
        return ids([f"{s3_url}/*.jsonl"], num_shards=5)

    rows, state = chain(make, PLAN, [(2, 3), (1, 2)], num_workers=2)
    rest = Ranks(make, PLAN, 3, state=state).pass_()
    assert sorted(flat(rows + rest)) == list(range(370))
    local = ids(str(tmp_path / "*.jsonl"), num_shards=5)
    assert json.loads(json.dumps(local.describe())) == state["data.source"]
    with pytest.raises(UsageError, match=r"\*\.nothing matches no file"):
        ids([f"{s3_url}/*.nothing"])
    with pytest.raises(UsageError, match="matches no file"):
        ids([f"{s3_url}/none.jsonl"])
