"""Bits that flip, ranges that are zeroed, files that are cut: every one is found, and none reaches live state."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from elastictrain.checkpoint import CheckpointReader, DamagedError
from elastictrain.checkpoint.blocks import MIN_BLOCK_BYTES, Blocks, Hasher, block_bytes_of
from elastictrain.checkpoint.export import verify
from elastictrain.errors import CheckpointError
from tests.checkpoint.states import assert_equal, blank, manager

STATE: dict[str, Tensor] = {
    "model.a": torch.randn(300, 200),
    "model.b": torch.randn(7),
    "model.ids": torch.arange(40_000),
    "optim.0.a.step": torch.tensor(3.0),
}


def test_a_hash_does_not_depend_on_how_the_bytes_came() -> None:
    data = memoryview(random.Random(0).randbytes(5 * MIN_BLOCK_BYTES + 77))
    want = Blocks.of(data)
    assert len(want.digests) == 6 * 8
    for seed in range(20):
        source, hasher, place = random.Random(seed), Hasher(len(data)), 0
        while place < len(data):
            took = source.choice([1, 1000, MIN_BLOCK_BYTES, 3 * MIN_BLOCK_BYTES])
            hasher.update(data[place : place + took])
            place += took
        assert hasher.finish() == want
    assert Blocks.parse(want.num_bytes, want.block_bytes, want.text) == want
    assert want.damage(MIN_BLOCK_BYTES, data[MIN_BLOCK_BYTES:]) is None


def test_blocks_are_small_and_few() -> None:
    for num_bytes in (0, 1, 10**6, 10**9, 10**10, 10**12):
        size = block_bytes_of(num_bytes)
        assert size >= MIN_BLOCK_BYTES and -(-num_bytes // size) <= 32768
        assert size == MIN_BLOCK_BYTES or size < num_bytes / 16000


def damage(file: Path, source: random.Random) -> str:
    """Change a file somewhere; what was done."""
    size = file.stat().st_size
    kind = source.choice(["flip", "flip", "cut", "zero"])
    place = source.randrange(size)
    if kind == "cut":
        os.truncate(file, place)
        return f"{file.name} cut to {place}"
    with open(file, "r+b") as opened:
        opened.seek(place)
        old = opened.read(source.choice([16, 4096]) if kind == "zero" else 1)
        new = bytes(len(old)) if kind == "zero" else bytes([old[0] ^ 1 << source.randrange(8)])
        if new == old:
            new = b"\xff" * len(old)
        opened.seek(place)
        opened.write(new)
    return f"{file.name} {kind} at {place}"


@pytest.mark.slow
def test_every_random_damage_is_found_and_changes_nothing(tmp_path: Path) -> None:
    path = Path(manager(str(tmp_path)).save(1, {**STATE, "trainer.step": 1}, about={"epoch": 1}).path)
    files = {file: file.read_bytes() for file in sorted(path.iterdir())}
    source = random.Random(1)
    for number in range(2000):
        file = source.choice(list(files))
        what = f"{number}: {damage(file, source)}"
        targets = blank(STATE)
        with pytest.raises(CheckpointError) as found:
            reader = CheckpointReader(path)
            assert (problems := verify(reader)), what
            assert file.name in problems[0], (what, problems)
            reader.load(targets)
        assert file.name in str(found.value), (what, found.value)
        assert_equal(targets, blank(STATE))
        file.write_bytes(files[file])
    targets = blank(STATE)
    CheckpointReader(path).load(targets)
    assert_equal(targets, STATE)
    assert verify(CheckpointReader(path)) == []


@pytest.mark.parametrize("storage", ["local", "s3"])
def test_damage_is_named_by_file_tensor_and_range(storage: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    url = str(tmp_path) if storage == "local" else request.getfixturevalue("s3_url")
    checkpoints = manager(url)
    path = checkpoints.save(1, STATE).path
    fs, shard = checkpoints.run_dir.fs, f"{path.removeprefix('s3://')}/shard-00000-of-00001.safetensors"
    reader = CheckpointReader(path)
    place = next(one for one in reader.manifests[0].pieces if one.name == "model.a").end - 4
    data = bytearray(fs.cat_file(shard))
    data[place] ^= 1
    fs.pipe_file(shard, bytes(data))
    start = place // MIN_BLOCK_BYTES * MIN_BLOCK_BYTES
    reason = rf"checkpoint {path} is damaged: shard-00000-of-00001.safetensors bytes {start} to \d+ \(.*\) is not what"
    with pytest.raises(DamagedError, match=reason) as found:
        reader.load({"model.a": torch.zeros(300, 200)})
    assert "model.a" in str(found.value)
    ids = {"model.ids": torch.zeros(40_000, dtype=torch.int64)}  # elsewhere in the file: it can be had
    reader.load(ids)
    assert_equal(ids, {"model.ids": STATE["model.ids"]})
