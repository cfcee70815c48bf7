"""Checkpoints that somebody has made up, with hashes that fit: refused in one line, or harmless; never much memory.

What a manifest or a COMMIT may say is tested in test_manifest.py. The header of a shard is for other readers: ours goes by
the manifest alone.
"""

from __future__ import annotations

import json
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from elastictrain.checkpoint import CheckpointReader, DamagedError, catalog, export, resolve, retention
from elastictrain.checkpoint.blocks import Blocks
from elastictrain.checkpoint.manifest import COMMIT, ManifestRef, seal
from elastictrain.errors import CheckpointError, UsageError
from elastictrain.rundir import RunDir
from tests.checkpoint.states import assert_equal, blank, manager
from tests.helpers import run_ranks

STATE = {"v": torch.full((8,), 2.0), "w": torch.ones(8)}
SHARD = "shard-00000-of-00001.safetensors"


def saved(run_dir: Path, step: int = 1) -> Path:
    return Path(manager(str(run_dir)).save(step, STATE).path)


def craft(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the manifest, and COMMIT so that it vouches for it; the shard is hashed as it is now."""
    content = json.loads((path / "manifest-00000.json").read_text())
    blocks = Blocks.of((path / SHARD).read_bytes())
    content["file"].update(bytes=blocks.num_bytes, hashes=blocks.text)
    change(content)
    data = json.dumps(content).encode()
    (path / "manifest-00000.json").write_bytes(data)
    commit = json.loads((path / COMMIT).read_text())
    ref = ManifestRef.of(data)
    commit["manifests"][0].update(bytes=ref.num_bytes, sha256=ref.sha256)
    del commit["sha256"]
    (path / COMMIT).write_bytes(seal(json.dumps(commit).encode()))


def refused(path: Path, reason: str) -> None:
    """With 1 GiB more than this process has: what is made up must not be believed before it is seen."""

    def load(rank: int, world_size: int) -> str:
        has = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (has + (1 << 30), resource.RLIM_INFINITY))
        targets = blank(STATE)
        with pytest.raises(CheckpointError) as found:
            CheckpointReader(path).load(targets)
        assert_equal(targets, blank(STATE))
        return str(found.value)

    (text,) = run_ranks(load, 1)
    assert reason in text and "\n" not in text, text


def test_two_tensors_at_one_place(tmp_path: Path) -> None:
    path = saved(tmp_path)
    craft(path, lambda content: content["tensors"]["w"].update(bytes=content["tensors"]["v"]["bytes"]))
    refused(path, "overlap others")


@pytest.mark.parametrize("shape", [[1 << 60], [0, 1 << 62], [1 << 20, 1 << 20]])
def test_a_tensor_that_is_larger_than_its_file(shape: list[int], tmp_path: Path) -> None:
    def change(content: dict[str, Any]) -> None:
        content["tensors"]["w"]["shape"] = shape
        if 0 in shape:
            content["tensors"]["w"].update(lengths=shape, offsets=[0, 0], bytes=[64, 64])

    path = saved(tmp_path)
    craft(path, change)
    one_dim = "leave a gap" if len(shape) == 1 else "w has shape [0" if 0 in shape else "box outside of its tensor"
    refused(path, one_dim)


def test_a_header_is_not_read(tmp_path: Path) -> None:
    """A length of 2^62, and JSON that names other places."""
    path = saved(tmp_path)
    data = bytearray((path / SHARD).read_bytes())
    data[:8] = (1 << 62).to_bytes(8, "little")
    data[8:20] = b'{"w":[[[[[[['
    (path / SHARD).write_bytes(data)
    craft(path, lambda content: None)
    targets = blank(STATE)
    CheckpointReader(path).load(targets)
    assert_equal(targets, STATE)


@pytest.mark.parametrize("name", [COMMIT, "manifest-00000.json"])
def test_a_huge_file_is_not_read(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    older = saved(tmp_path, 1)
    path = saved(tmp_path, 2)
    with open(path / name, "r+b") as file:
        file.truncate(1 << 40)  # a sparse file
    refused(path, f"{name} has 1099511627776 bytes")
    assert resolve(str(tmp_path)) == str(older)
    assert "is damaged" in caplog.text and "1099511627776 bytes" in caplog.text


@pytest.mark.parametrize("name", [SHARD, "manifest-00000.json", COMMIT])
def test_a_file_that_is_a_link_is_not_followed(name: str, tmp_path: Path) -> None:
    path = saved(tmp_path / "run")
    (path / name).rename(tmp_path / "elsewhere")
    (path / name).symlink_to(tmp_path / "elsewhere")
    refused(path, f"it has no {COMMIT}" if name == COMMIT else f"{name} is missing")


@pytest.mark.parametrize("what", ["step", "attempt"])
def test_a_folder_that_is_a_link_is_passed_over_and_not_deleted(
    what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Else who may write here could have checkpoints of others deleted."""
    others = saved(tmp_path / "others", 5)
    mine = saved(tmp_path / "run", 1)
    link = mine.parents[1] / "step-00000005"
    if what == "step":
        link.symlink_to(others.parent)
    else:
        link.mkdir()
        (link / others.name).symlink_to(others)
    run_dir = RunDir(str(tmp_path / "run"))
    assert catalog.newest(run_dir) == str(mine)
    assert "is damaged: it is a symbolic link, and what it points to may be somebody else's" in caplog.text
    assert retention.surplus(run_dir, retention.Keep(last=1)) == []
    retention.sweep(run_dir, grace=-60.0)
    assert link.exists() and CheckpointReader(others).step == 5


def test_no_path_leads_out_of_the_folder(tmp_path: Path) -> None:
    """Names of tensors become no paths, and those of files are the expected ones or refused."""
    path = saved(tmp_path / "run")

    def rename(content: dict[str, Any]) -> None:
        content["tensors"]["../../../up"] = content["tensors"].pop("w")
        content["tensors"]["/etc/down"] = content["tensors"].pop("v")

    craft(path, rename)
    for to in ("safetensors", "torch", "dcp"):
        export.export(CheckpointReader(path), tmp_path / to, to=to)
        assert not [one for one in (tmp_path / to).rglob("*") if one.name in ("up", "down")]
    assert sorted(one.name for one in tmp_path.iterdir()) == ["dcp", "run", "safetensors", "torch"]
    craft(path, lambda content: content["file"].update(name=f"../{path.name}/{SHARD}"))
    with pytest.raises(DamagedError, match="is of rank 0 and file '../"):
        CheckpointReader(path)
    with pytest.raises(UsageError, match="there is no committed checkpoint"):
        resolve(str(path.parents[1] / "step-00000001" / ".." / ".." / ".."))
