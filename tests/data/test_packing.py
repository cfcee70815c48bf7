"""Packing: every token of every document once, in order, from any cursor."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from elastictrain.data import SampleStream, files
from elastictrain.data.slots import SlotPlan
from elastictrain.errors import UsageError
from tests.data.streams import Ranks, chain, flat

PLAN = SlotPlan(6, 2)
EOS = 0


@pytest.fixture
def documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Files of lines of 0 to 90 numbers; every number is there once, and above 0."""
    monkeypatch.setattr(files, "MIN_PIECE", 500)
    draw, number, names = random.Random(3), 1, []
    for file in range(5):
        lines = []
        for _ in range(draw.randrange(20, 40)):
            size = draw.choice([1, 3, 17, 90])
            lines.append(" ".join(map(str, range(number, number + size))))
            number += size
        names.append(str(tmp_path / f"{file}.txt"))
        Path(names[-1]).write_text("\n".join(lines) + "\n")
    return names


def tokenize(text: str) -> list[int]:
    return [int(word) for word in text.split()]


def packed(names: list[str], *, length: int = 13, eos: int | None = EOS, **options: Any) -> SampleStream:
    return SampleStream.text(names, **options).packed(length, tokenize=tokenize, eos=eos)


@pytest.mark.parametrize("length", [1, 13, 200])
@pytest.mark.parametrize("order", [None, 4])
def test_rows_are_the_joined_documents(documents: list[str], length: int, order: int | None) -> None:
    plain = SampleStream.text(documents).source
    source = packed(documents, length=length).source
    for shard in range(3):
        joined: list[int] = []
        for line, _ in plain.read(shard, 3, order=order):
            joined += [*tokenize(line), EOS]
        rows = [row for row, _ in source.read(shard, 3, order=order)]
        assert all(row.dtype == torch.int64 and row.shape == (length,) for row in rows)
        assert len({row.data_ptr() for row in rows}) == len(rows)
        assert [token for row in rows for token in row.tolist()] == joined[: len(joined) // length * length]


def test_any_cursor_resumes_exactly(documents: list[str]) -> None:
    source = packed(documents).source
    for shard in range(2):
        reads = [(row.tolist(), cursor) for row, cursor in source.read(shard, 2, order=4)]
        for place in range(0, len(reads), 3):
            cursor = json.loads(json.dumps(reads[place][1]))
            again = [(row.tolist(), cursor) for row, cursor in source.read(shard, 2, order=4, cursor=cursor)]
            assert again == reads[place + 1 :]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_run_through_many_worlds_uses_each_token_once(documents: list[str], num_workers: int) -> None:
    def make() -> SampleStream:
        return packed(documents, num_shards=7, eos=None)

    rows, state = chain(make, PLAN, [(4, 3), (3, 5), (1, 2), (5, 4), (2, 3)], num_workers=num_workers)
    rest = Ranks(make, PLAN, 2, state=state).pass_()
    one = Ranks(make, PLAN, 1).pass_()
    assert [row.tolist() for row in flat(rows + rest)] == [row.tolist() for row in flat(one)]
    tokens = [token for row in flat(one) for token in row.tolist()]
    assert len(tokens) == len(set(tokens))
    total = sum(len(tokenize(Path(name).read_text())) for name in documents)
    assert total - 7 * 12 <= len(tokens) <= total  # less than a row is left in each shard


def test_rows_are_stacked_into_batches_and_transformed(documents: list[str]) -> None:
    stream = SampleStream.text(documents, transform=str.upper, repeat=True, seed=4)
    rows = stream.packed(9, tokenize=tokenize, transform=lambda row: (row[:-1], row[1:]))
    assert (rows.repeat, rows.seed, rows.shuffle) == (True, 4, True)
    from torch.utils.data import default_collate

    row = Ranks(lambda: rows, PLAN, 1, collate_fn=default_collate)
    work = next(row.feeds[0].epoch())
    inputs, targets = next(work.slots).batch
    assert inputs.shape == targets.shape == (2, 8)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


@pytest.mark.parametrize(
    "tokenizer",
    [
        lambda text: tokenize(text),
        lambda text: tuple(tokenize(text)),
        lambda text: np.array(tokenize(text), np.uint16),
        lambda text: torch.tensor(tokenize(text)),
        lambda text: {"input_ids": tokenize(text), "attention_mask": []},
    ],
)
def test_what_tokenizers_return(documents: list[str], tokenizer: Any) -> None:
    rows = list(SampleStream.text(documents).packed(13, tokenize=tokenizer, eos=EOS))
    assert [row.tolist() for row in rows] == [row.tolist() for row in packed(documents)]


def test_bytes_are_tokens(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("ab\né\n")
    rows = SampleStream.text(str(tmp_path / "a.txt"), each="file").packed(3, tokenize=str.encode)
    assert [row.tolist() for row in rows] == [[97, 98, 10], [0xC3, 0xA9, 10]]


def test_bad_tokens_are_refused(documents: list[str]) -> None:
    for tokenizer in (lambda text: "abc", lambda text: [[1, 2]], lambda text: [0.5], lambda text: None):
        with pytest.raises(UsageError, match="it must return one row of integers, or bytes"):
            list(SampleStream.text(documents).packed(4, tokenize=tokenizer))
    with pytest.raises(UsageError, match="packed length=0 must be at least 1"):
        packed(documents, length=0)


def test_a_shard_without_a_whole_row_is_refused_where_it_would_never_end(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("1 2 3\n" * 9)
    assert list(packed([str(tmp_path / "a.txt")], length=100)) == []
    with pytest.raises(UsageError, match="have no samples, and repeat=True"):
        list(packed([str(tmp_path / "a.txt")], length=100, repeat=True))
