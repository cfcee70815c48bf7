"""Manifests and COMMITs from anywhere: what does not add up is refused before a byte is loaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from elastictrain.checkpoint import DamagedError
from elastictrain.checkpoint.blocks import Blocks
from elastictrain.checkpoint.manifest import Commit, Manifest, ManifestRef, seal, tensors_of, values_of
from elastictrain.checkpoint.pieces import Piece

PIECES = (Piece("a", "F32", (4, 2), (0, 0), (2, 2), start=64), Piece("b", "BF16", (), (), (), start=80))
MANIFEST = Manifest(0, 2, Blocks.of(bytes(82)), PIECES, {"x": [1]})


def test_they_come_back_as_they_were() -> None:
    assert Manifest.from_json(MANIFEST.to_json(), rank=0, world_size=2) == MANIFEST
    commit = Commit(7, 3, 1.5, 100, (ManifestRef.of(b"one"), ManifestRef.of(b"two")), {"mesh": {"dp": 2}})
    assert Commit.from_json(commit.to_json()) == commit and commit.world_size == 2


def changed(*path: str, to: Any) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        for key in path[:-1]:
            content = content[key]
        content[path[-1]] = to

    return change


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (changed("file", "name", to="../../etc/passwd"), "of rank 0 and file '../../etc/passwd'"),
        (changed("file", "name", to="/etc/passwd"), "of rank 0 and file '/etc/passwd'"),
        (changed("file", "name", to="shard-00001-of-00002.safetensors"), "of rank 0 and file 'shard-00001"),
        (changed("rank", to=1), "of rank 1 and file"),
        (changed("format", to=2), "has format 2 and this version reads 1"),
        (changed("file", "bytes", to=-1), "bytes is .* instead of counts"),
        (changed("file", "bytes", to=1 << 70), "bytes is .* instead of counts"),
        (changed("file", "bytes", to=True), "bytes is .* instead of counts"),
        (changed("file", "bytes", to=81), "the bytes of b overlap others or lie outside of the file"),
        (changed("file", "bytes", to=65537), "has no xxh3-64 hashes for 65537 bytes in blocks of 32768"),
        (changed("file", "block_bytes", to=1), "has no xxh3-64 hashes for 82 bytes in blocks of 1"),
        (changed("file", "block_bytes", to=1 << 62), "has no xxh3-64 hashes"),
        (changed("file", "hash", to="none"), "has no xxh3-64 hashes"),
        (changed("file", "hashes", to=["a"]), "has no xxh3-64 hashes"),
        (changed("file", "hashes", to="ü" * 12), "has no xxh3-64 hashes"),
        (changed("tensors", "b", "bytes", to=[78, 80]), "the bytes of b overlap others"),
        (changed("tensors", "a", "bytes", to=[68, 84]), "the bytes of a overlap others or lie outside"),
        (changed("tensors", "a", "bytes", to=[66, 82]), "16 bytes at 66 and needs 16, aligned"),
        (changed("tensors", "a", "bytes", to=[64, 76]), "12 bytes at 64 and needs 16"),
        (changed("tensors", "a", "bytes", to=[-16, 0]), "bytes is .* instead of counts"),
        (changed("tensors", "a", "bytes", to=[64]), "box outside of its tensor"),
        (changed("tensors", "a", "offsets", to=[3, 0]), "a is a box outside of its tensor"),
        (changed("tensors", "a", "offsets", to=[0]), "a is a box outside of its tensor"),
        (changed("tensors", "a", "lengths", to=[2, 1 << 62]), "a is a box outside of its tensor"),
        (changed("tensors", "a", "shape", to=[4.0, 2]), "shape is .* instead of counts"),
        (changed("tensors", "a", "dtype", to="O"), "unknown dtype 'O'"),
        (changed("tensors", "a", "dtype", to=["F32"]), "unknown dtype"),
        (changed("tensors", to=[]), "has no tensors"),
        (changed("tensors", "a", to=None), "has no a"),
        (changed("values", to=3), "has no values"),
        (changed("file", to=None), "has no file"),
    ],
)
def test_a_manifest_that_cannot_be_true_is_refused(change: Callable[[dict[str, Any]], None], reason: str) -> None:
    content = json.loads(MANIFEST.to_json())
    change(content)
    with pytest.raises(DamagedError, match=reason):
        Manifest.from_json(json.dumps(content).encode(), rank=0, world_size=2)


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"null", b"{", b"\xff\xfe", b"[" * 100_000, b'{"format": NaN}', b"9" * 5000]
)
def test_what_is_not_a_json_object_is_refused(data: bytes) -> None:
    for read in (Commit.from_json, lambda data: Manifest.from_json(data, rank=0, world_size=1)):
        with pytest.raises(DamagedError, match="is not JSON|is not a JSON object|has format"):
            read(data)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (changed("manifests", to=[]), "lists no manifests"),
        (changed("manifests", to={"0": 1}), "lists no manifests"),
        (
            changed("manifests", to=[{"name": "../manifest-00000.json"}]),
            "entry 0 of its manifests is not manifest-00000.json",
        ),
        (changed("manifests", to=[3]), "entry 0 of its manifests"),
        (changed("time", to="now"), "lists no manifests, or no time"),
        (changed("step", to=-1), "step is .* instead of counts"),
        (changed("num_bytes", to=None), "num_bytes is .* instead of counts"),
        (changed("about", to=[]), "has no about"),
    ],
)
def test_a_commit_that_cannot_be_true_is_refused(change: Callable[[dict[str, Any]], None], reason: str) -> None:
    content = json.loads(Commit(7, 3, 1.5, 100, (ManifestRef.of(b"one"),), {}).to_json())
    change(content)
    del content["sha256"]
    with pytest.raises(DamagedError, match=reason):
        Commit.from_json(seal(json.dumps(content).encode()))


def test_a_commit_vouches_for_itself() -> None:
    good = Commit(7, 3, 1.5, 100, (ManifestRef.of(b"one"),), {"loss": 1.25}).to_json()
    for place in range(len(good)):
        for bit in range(8):
            bad = bytearray(good)
            bad[place] ^= 1 << bit
            with pytest.raises(DamagedError):
                Commit.from_json(bytes(bad))


def boxes(*parts: tuple[tuple[int, ...], tuple[int, ...]], shape: tuple[int, ...], dtype: str = "U8") -> list[Manifest]:
    return [
        Manifest(rank, len(parts), Blocks.of(bytes(1 << 16)), (Piece("w", dtype, shape, offsets, lengths),), {})
        for rank, (offsets, lengths) in enumerate(parts)
    ]


@pytest.mark.parametrize(
    ("manifests", "good"),
    [
        (boxes(((0,), (2,)), ((2,), (3,)), shape=(5,)), True),
        (boxes(((0,), (2,)), ((2,), (3,)), ((5,), (0,)), shape=(5,)), True),
        (boxes(((0,), (3,)), ((2,), (2,)), shape=(5,)), False),  # overlap, gap
        (boxes(((0,), (2,)), ((3,), (2,)), shape=(5,)), False),  # gap
        (boxes(((0,), (5,)), ((2,), (3,)), shape=(5,)), False),  # overlap
        (boxes(((0, 0), (2, 2)), ((0, 2), (2, 2)), ((2, 0), (2, 4)), shape=(4, 4)), True),
        (boxes(((0, 0), (2, 4)), ((1, 0), (2, 2)), ((2, 2), (2, 2)), shape=(4, 4)), False),  # overlap, gap
        (boxes(((), ()), shape=()), True),
        (boxes(((), ()), ((), ()), shape=()), False),
        (boxes(((0, 0), (0, 3)), shape=(0, 3)), True),
    ],
)
def test_the_pieces_of_all_ranks_must_fit_together(manifests: list[Manifest], good: bool) -> None:
    if good:
        assert tensors_of(manifests)["w"][1] == "U8"
    else:
        with pytest.raises(DamagedError, match="the pieces of w overlap or leave a gap"):
            tensors_of(manifests)


def test_many_ranks_are_checked_quickly() -> None:
    columns = boxes(*(((0, i), (4, 1)) for i in range(4000)), shape=(4, 4000))
    assert tensors_of(columns)["w"] == ((4, 4000), "U8")


def test_ranks_that_disagree_are_refused() -> None:
    with pytest.raises(DamagedError, match="disagree about the shape or dtype of w"):
        tensors_of([*boxes(((0,), (2,)), shape=(4,)), *boxes(((2,), (2,)), shape=(4,), dtype="I8")])
    one, other = (
        Manifest(0, 2, Blocks.of(b""), (), {"x": 1, "y": 2}),
        Manifest(1, 2, Blocks.of(b""), (), {"x": 1, "z": 3}),
    )
    assert values_of([one, other]) == {"x": 1, "y": 2, "z": 3}
    with pytest.raises(DamagedError, match="disagree about the value of x"):
        values_of([one, Manifest(1, 2, Blocks.of(b""), (), {"x": 2})])
