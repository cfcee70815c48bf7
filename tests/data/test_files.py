"""Lines across ranges against splitting in Python, and files that are not as they should be."""

from __future__ import annotations

import bz2
import gzip
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elastictrain.data import files, sources
from elastictrain.data.files import RecordError, cut, find_files
from elastictrain.data.sources import DocumentSource, JsonLineSource, LineSource
from elastictrain.errors import UsageError


def read_all(source: sources.Source, num_shards: int, order: int | None = None) -> list[list[object]]:
    return [[sample for sample, _ in source.read(s, num_shards, order=order)] for s in range(num_shards)]


def expected(data: bytes) -> list[str]:
    """The records of a file, by Python's own splitting."""
    found = [line.removesuffix(b"\r").decode() for line in data.split(b"\n")]
    return [line for line in found if line and not line.isspace()]


def random_file(draw: random.Random) -> bytes:
    parts = []
    for number in range(draw.randrange(25)):
        body = f"{number}:" + "".join(draw.choice("aé漢😀 \r\u2028") for _ in range(draw.choice([0, 3, 20, 90])))
        parts.append(draw.choice([body, body, body, "", " \t"]) + draw.choice(["\n", "\r\n"]))
    data = "".join(parts).encode()
    return data.rstrip(b"\r\n") if draw.random() < 0.5 else data


def test_random_boundaries_match_splitting_in_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(1)
    for round_ in range(40):
        # blocks, pieces and shards of a few bytes, so that records cross the borders of all three
        monkeypatch.setattr(files, "BLOCK", draw.choice([2, 7, 64, 64, 300, 1 << 20]))
        monkeypatch.setattr(files, "OVERHANG", draw.choice([3, 50, 1 << 16]))
        monkeypatch.setattr(files, "MIN_PIECE", draw.choice([5, 50, 500, 1 << 18]))
        folder = tmp_path / str(round_)
        folder.mkdir()
        contents = [random_file(draw) for _ in range(draw.randrange(1, 4))]
        contents.append(b"last\n")
        for number, data in enumerate(contents):
            (folder / f"{number}.txt").write_bytes(data)
        want = [line for data in contents for line in expected(data)]
        source = LineSource(f"{folder}/*.txt")
        for num_shards in (1, 2, draw.randrange(3, 25)):
            shards = read_all(source, num_shards)
            assert [line for shard in shards for line in shard] == want  # in order too: ranges follow one another
            shuffled = [line for shard in read_all(source, num_shards, order=draw.randrange(99)) for line in shard]
            assert sorted(shuffled) == sorted(want)


def test_any_cursor_resumes_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MIN_PIECE", 100)
    draw = random.Random(2)
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_bytes(b"\n".join([random_file(draw) for _ in range(4)]) + b"\nlast")
    with gzip.open(tmp_path / "c.txt.gz", "wb") as file:
        file.write(b"".join(b"zipped %d\n" % i for i in range(50)))
    names = [f"{tmp_path}/*.txt", f"{tmp_path}/c.txt.gz"]
    source = LineSource(names)
    for order in (None, 5):
        for shard in range(3):
            reads = list(source.read(shard, 3, order=order))
            assert len(reads) > 10
            for place, (_, cursor) in enumerate(reads):
                cursor = json.loads(json.dumps(cursor))
                assert list(LineSource(names).read(shard, 3, order=order, cursor=cursor)) == reads[place + 1 :]


def test_one_huge_file_is_shared_evenly_and_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "huge.txt"
    path.write_bytes(b"".join(b"%07d %s\n" % (i, b"x" * 91) for i in range(40_000)) + b"y" * 3_000_000 + b"\nend\n")
    source = LineSource(str(path))
    num_bytes = 0

    def counted(*args: Any) -> Iterator[bytes]:
        nonlocal num_bytes
        for block in files.blocks(*args):
            num_bytes += len(block)
            yield block

    monkeypatch.setattr(sources, "blocks", counted)
    shards = read_all(source, 7)
    overhead = (
        7 * 4 * files.OVERHANG + 2 * 3_000_000
    )  # of each piece, and of the long line, whose start is sought twice
    assert num_bytes < path.stat().st_size + overhead
    lines = [line for shard in shards for line in shard]
    assert len(lines) == 40_002
    assert len(lines[-2]) == 3_000_000
    assert lines[-1] == "end"
    sizes = [sum(len(line) + 1 for line in shard) for shard in shards[:3]]  # type: ignore[arg-type]
    assert max(sizes) - min(sizes) <= 100
    pieces = cut(find_files(str(path)), 7)
    assert all(
        len(shard) == 4 for shard in pieces
    )  # about 1 MB each, in parts of 256 KiB: there is something to shuffle
    assert read_all(source, 7, order=1)[0] != shards[0]


def test_shards_are_level_when_some_files_cannot_be_split(tmp_path: Path) -> None:
    for number, size in enumerate([4000, 100, 2500, 900]):
        (tmp_path / f"{number}.txt").write_bytes(b"x" * size)
    for number, size in enumerate([3000, 700, 50, 2000]):
        (tmp_path / f"{number}.txt.gz").write_bytes(b"x" * size)
    found = find_files([f"{tmp_path}/*.txt", f"{tmp_path}/*.gz"])
    for num_shards in range(1, 12):
        loads = [0] * num_shards
        covered: dict[int, list[tuple[int, int]]] = {}
        for shard, pieces in enumerate(cut(found, num_shards)):
            for piece in pieces:
                stop = min(piece.stop, found[piece.file].size)
                loads[shard] += stop - piece.start
                covered.setdefault(piece.file, []).append((piece.start, stop))
        for index, ranges in covered.items():  # each byte once
            assert sorted(ranges)[0][0] == 0
            assert sorted(ranges)[-1][1] == found[index].size
            assert all(a[1] == b[0] for a, b in zip(sorted(ranges), sorted(ranges)[1:], strict=False))
        assert len(covered) == 8
        assert max(loads) <= max(3000, -(-sum(loads) // num_shards))  # the largest whole file, or level


def test_compressed_files_are_read_whole(tmp_path: Path) -> None:
    want = []
    for number, opener in enumerate([gzip.open, bz2.open, gzip.open, gzip.open]):
        suffix = "bz2" if opener is bz2.open else "gz"
        with opener(tmp_path / f"{number}.jsonl.{suffix}", "wb") as file:
            for i in range(300 * number + 1):
                file.write(b'{"id": %d}\r\n' % len(want))
                want.append(len(want))
                assert i >= 0
    source = JsonLineSource(f"{tmp_path}/*", field="id")
    shards = read_all(source, 3)
    assert sorted(x for shard in shards for x in shard) == want  # type: ignore[type-var]
    assert source.max_shards == 4
    broken = tmp_path / "3.jsonl.gz"
    broken.write_bytes(broken.read_bytes()[:-200])
    with pytest.raises(RecordError, match=r"3\.jsonl\.gz cannot be read"):
        read_all(JsonLineSource(str(broken)), 1)


def test_documents_are_whole_files(tmp_path: Path) -> None:
    want = []
    for number in range(9):
        text = f"file {number}\n\n" * number  # the first is empty
        (tmp_path / f"{number}.txt").write_text(text)
        want.append(text)
    source = DocumentSource(f"{tmp_path}/*")
    shards = read_all(source, 4, order=3)
    assert sorted(x for shard in shards for x in shard) == sorted(want[1:])  # type: ignore[type-var]
    assert all(shards)
    reads = list(source.read(0, 2, order=3))
    assert list(source.read(0, 2, order=3, cursor=reads[1][1])) == reads[2:]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"id": 1', r"the record at byte 26 is not JSON \(.*\): \{\"id\": 1$"),
        (b'{"other": 1, "b": 2}', r"the record at byte 26 has no field 'id', it has the fields 'other', 'b'"),
        (b"[1, 2]", r"the record at byte 26 has no field 'id', it has a list"),
        (b'{"id": "\xff"}', r"the record at byte 26 is not UTF-8 \(invalid start byte at byte 34\)"),
    ],
)
def test_a_bad_record_names_file_and_byte(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"id": "first"}\n\r\n    \n' + line + b"\n")
    reads = JsonLineSource(str(path), field="id").read(0, 1, order=None)
    assert next(reads)[0] == "first"  # behind a byte order mark
    with pytest.raises(RecordError, match=f"^{re.escape(str(path))}: {message}"):
        next(reads)


def test_files_that_shrink_or_go_are_noticed(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"line\n" * 100)
    source = LineSource(str(path))
    path.write_bytes(b"line\n" * 50)
    with pytest.raises(RecordError, match=r"a\.txt cannot be read at byte 0 .*500 bytes when the stream was made"):
        read_all(source, 1)
    path.unlink()
    with pytest.raises(RecordError, match=r"a\.txt cannot be read at byte 0 \(FileNotFoundError"):
        read_all(source, 1)


def test_what_cannot_be_found_is_refused(tmp_path: Path) -> None:
    def refused(urls: str | list[str]) -> str:
        with pytest.raises(UsageError) as error:
            find_files(urls)
        assert "\n" not in str(error.value)
        return str(error.value)

    (tmp_path / "empty.txt").touch()
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "[odd].txt").write_text("x")
    assert refused(f"{tmp_path}/*.jsonl") == f"{tmp_path}/*.jsonl matches no file: check the path or the pattern"
    assert "matches no file" in refused(f"{tmp_path}/none.txt")
    assert refused(str(tmp_path)) == f"{tmp_path} is a folder: name its files, for example {tmp_path}/*"
    assert "is named twice" in refused([f"{tmp_path}/a.txt", f"{tmp_path}/*.txt"])
    assert "all empty" in refused(f"{tmp_path}/empty.txt")
    assert "at least one path" in refused([])
    assert "cannot be listed (ValueError: Protocol not known: nosuch" in refused("nosuch://x/y")
    assert "pip install 'elastictrain[gcs]'" in refused("gs://bucket/x.txt")
    assert [file.path for file in find_files(f"{tmp_path}/[odd].txt")] == [f"{tmp_path}/[odd].txt"]
