"""Parquet and Hugging Face datasets: each row once, any cursor resumes, what cannot be exact is refused."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest

from elastictrain.data import SampleStream
from elastictrain.data.files import RecordError
from elastictrain.data.slots import SlotPlan
from elastictrain.data.sources import Source
from elastictrain.errors import UsageError
from tests.data.streams import Ranks, chain, flat

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
datasets = pytest.importorskip("datasets")
split_dataset_by_node = pytest.importorskip("datasets.distributed").split_dataset_by_node

PLAN = SlotPlan(12, 4)
HOPS = [(4, 3), (3, 2), (1, 4), (5, 2), (2, 3)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three parquet files of 500, 0 and 220 rows, in row groups of 150."""
    number = 0
    for file, rows in enumerate([500, 0, 220]):
        ids = list(range(number, number + rows))
        table = pa.table({"id": pa.array(ids, pa.int64()), "text": [f"row {i}" for i in ids], "x": [[i] for i in ids]})
        pq.write_table(table, tmp_path / f"{file}.parquet", row_group_size=150)
        number += rows
    return tmp_path


def row_id(row: Any) -> int:
    return int(row["id"])


def check_exactly_once(make: Callable[[], SampleStream], total: int, *, num_workers: int = 0) -> None:
    rows, state = chain(make, PLAN, HOPS, num_workers=num_workers)
    one = Ranks(make, PLAN, 1)
    assert rows == [one.step() for _ in rows]
    rest = Ranks(make, PLAN, 3, state=state).pass_()
    assert rest == one.pass_()
    assert sorted(flat(rows + rest)) == list(range(total))


def check_cursors(source: Source, num_shards: int, order: int | None, *, every: int = 1) -> None:
    """Every so many rows: leave the shard and read on, from where the last reader stood, and compare with one pass."""
    for shard in range(num_shards):
        whole = [row_id(row) for row, _ in source.read(shard, num_shards, order=order)]
        for first in range(0, len(whole), every):
            place, cursor = 0, None
            for count in (first, every // 2, 1, every, len(whole)):
                reads = list(islice(source.read(shard, num_shards, order=order, cursor=cursor), count))
                assert [row_id(row) for row, _ in reads] == whole[place : place + count]
                place += len(reads)
                cursor = json.loads(json.dumps(reads[-1][1])) if reads else cursor


# ---- parquet -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, 2])
def test_parquet_rows_each_once(folder: Path, num_workers: int) -> None:
    def make() -> SampleStream:
        return SampleStream.parquet(f"{folder}/*", columns=["id"], num_shards=7, transform=row_id)

    check_exactly_once(make, 720, num_workers=num_workers)


def test_parquet_shards_are_even_to_the_row_and_resume_anywhere(folder: Path) -> None:
    source = SampleStream.parquet(f"{folder}/*").source
    for num_shards in (1, 7, 50):
        shards = [[row_id(row) for row, _ in source.read(s, num_shards, order=None)] for s in range(num_shards)]
        assert [row for shard in shards for row in shard] == list(range(720))
        assert {len(shard) for shard in shards} <= {720 // num_shards, 720 // num_shards + 1}
    check_cursors(source, 7, 3, every=7)
    check_cursors(pickle.loads(pickle.dumps(source)), 2, None, every=50)
    assert next(source.read(0, 1, order=None))[0] == {"id": 0, "text": "row 0", "x": [0]}
    assert next(SampleStream.parquet(f"{folder}/*", columns=["x"]).source.read(0, 1, order=None))[0] == {"x": [0]}


def test_parquet_that_cannot_be_read_is_named(folder: Path) -> None:
    with pytest.raises(UsageError, match=r"0\.parquet has no column 'y': it has 'id', 'text', 'x'"):
        SampleStream.parquet(f"{folder}/0.parquet", columns=["y"])
    with pytest.raises(UsageError, match="have no rows"):
        SampleStream.parquet(f"{folder}/1.parquet")
    stream = SampleStream.parquet(f"{folder}/2.parquet")
    data = (folder / "2.parquet").read_bytes()
    (folder / "2.parquet").write_bytes(data[:4] + b"\0" * 600 + data[604:])
    with pytest.raises(RecordError, match=r"2\.parquet: row group 0 cannot be read"):
        list(stream)
    (folder / "3.parquet").write_bytes(b"not parquet at all")
    with pytest.raises(UsageError, match=r"3\.parquet cannot be read as parquet \(ArrowInvalid: .*: leave it out"):
        SampleStream.parquet(f"{folder}/*")


def test_parquet_from_an_object_store(folder: Path, s3_url: str) -> None:
    import s3fs

    for name in folder.glob("*.parquet"):
        s3fs.S3FileSystem().put(str(name), f"{s3_url.removeprefix('s3://')}/{name.name}")
    stream = SampleStream.parquet(f"{s3_url}/*.parquet", columns=["id"], transform=row_id)
    assert sorted(stream) == list(range(720))


# ---- Hugging Face datasets -----------------------------------------------------------------------------------------


def table(rows: int = 720) -> Any:
    return datasets.Dataset.from_dict({"id": list(range(rows)), "text": [f"row {i}" for i in range(rows)]})


def test_a_dataset_is_shuffled_completely_each_row_once() -> None:
    check_exactly_once(lambda: SampleStream.datasets(table(), num_shards=7, transform=row_id), 720)
    check_cursors(SampleStream.datasets(table(100)).source, 3, 5, every=9)
    assert list(SampleStream.datasets(table(9), shuffle=False, transform=row_id)) == list(range(9))
    once = list(SampleStream.datasets(table(), transform=row_id))
    assert sum(abs(a - b) == 1 for a, b in pairwise(once)) < 20
    tensors = SampleStream.datasets(table().with_format("torch"), shuffle=False)
    assert next(iter(tensors))["id"].shape == ()
    assert len(list(SampleStream.datasets(table(0 + 3), num_shards=3))) == 3


def ids_of(ids: list[int]) -> Any:
    for start in ids:
        yield from ({"id": i} for i in range(start, start + 72))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_streaming_dataset_each_row_once(folder: Path, num_workers: int) -> None:
    def make() -> SampleStream:
        streaming = table().to_iterable_dataset(num_shards=10)
        return SampleStream.datasets(streaming, num_shards=5, transform=row_id)

    check_exactly_once(make, 720, num_workers=num_workers)


def parquet(folder: Path) -> Any:
    names = [f"{folder}/0.parquet", f"{folder}/2.parquet"]
    return datasets.load_dataset("parquet", data_files=names, split="train", streaming=True)


PIPELINES: dict[str, Callable[[Path], Any]] = {
    "generator": lambda folder: datasets.IterableDataset.from_generator(
        ids_of, gen_kwargs={"ids": list(range(0, 720, 72))}
    ),
    "parquet": parquet,
    "row groups": lambda folder: parquet(folder).reshard(),
    "map": lambda folder: parquet(folder).map(lambda row: {"id": row["id"] + 1}),
    "batched map": lambda folder: parquet(folder).map(
        lambda rows: {"id": [i for i in rows["id"] for _ in "ab"], "text": [t for t in rows["text"] for _ in "ab"]},
        batched=True,
        batch_size=50,
        remove_columns=["x"],
    ),
    "filter": lambda folder: parquet(folder).filter(lambda row: row["id"] % 3 == 0),
    "torch": lambda folder: parquet(folder).select_columns(["id"]).with_format("torch"),
    "interleaved": lambda folder: datasets.interleave_datasets(
        [table().to_iterable_dataset(num_shards=2), table(300).to_iterable_dataset(num_shards=3)],
        probabilities=[0.7, 0.3],
        seed=3,
    ),
    "concatenated": lambda folder: datasets.concatenate_datasets([parquet(folder), parquet(folder)]),
}


@pytest.mark.parametrize("name", PIPELINES)
def test_any_exact_pipeline_resumes_anywhere(folder: Path, name: str) -> None:
    make = PIPELINES[name]
    source = SampleStream.datasets(make(folder)).source
    assert source.max_shards is not None
    check_cursors(source, source.max_shards, 3, every=83)
    check_cursors(source, 1, None, every=211)
    if name != "interleaved":  # which stops when the first of its datasets ends, in each of its shards
        got = [row_id(row) for s in range(source.max_shards) for row, _ in source.read(s, source.max_shards, order=3)]
        assert sorted(got) == sorted(map(row_id, make(folder)))


@pytest.mark.parametrize(
    ("pipeline", "message"),
    [
        (lambda ds: ds.shuffle(seed=1, buffer_size=100), "has a shuffle buffer of 100 samples"),
        (lambda ds: ds.shuffle(seed=1, buffer_size=100).map(lambda row: row), "leave out .shuffle"),
        (lambda ds: ds.take(10), r"is cut by \.take\(10\)"),
        (lambda ds: ds.skip(10).map(lambda row: row), r"is cut by \.skip\(10\)"),
        (lambda ds: split_dataset_by_node(ds, 0, 2), "already split by node"),
        (lambda ds: ds.with_format("arrow"), "yields arrow tables"),
        (lambda ds: datasets.interleave_datasets([ds, ds.shuffle(seed=1)]), "has a shuffle buffer of 1000"),
    ],
)
def test_a_pipeline_that_cannot_resume_exactly_is_refused(pipeline: Callable[[Any], Any], message: str) -> None:
    dataset = pipeline(table().to_iterable_dataset(num_shards=4))
    with pytest.raises(UsageError, match=message) as error:
        SampleStream.datasets(dataset)
    assert "\n" not in str(error.value)


def test_what_is_not_a_dataset_is_refused() -> None:
    with pytest.raises(UsageError, match=r"has the splits train, test: choose one, for example dataset\['train'\]"):
        SampleStream.datasets(datasets.DatasetDict({"train": table(), "test": table()}))
    with pytest.raises(UsageError, match="not a list"):
        SampleStream.datasets([1, 2])
    with pytest.raises(UsageError, match="has no rows"):
        SampleStream.datasets(table(0))
    with pytest.raises(UsageError, match=r"at most 4 shards and 5 are asked for: lower num_shards.*reshard\(\)"):
        SampleStream.datasets(table().to_iterable_dataset(num_shards=4), num_shards=5)
