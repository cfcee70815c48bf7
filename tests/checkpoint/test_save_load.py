"""One process: what is saved comes back on every kind of storage, and what does not fit is refused before it hurts."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from fsspec.implementations.memory import MemoryFileSystem
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader

from elastictrain.checkpoint import CheckpointReader, DamagedError
from elastictrain.checkpoint import ranges as ranges_module
from elastictrain.checkpoint import reader as reader_module
from elastictrain.checkpoint.blocks import MIN_BLOCK_BYTES
from elastictrain.checkpoint.manifest import COMMIT
from elastictrain.checkpoint.ranges import Ranges
from elastictrain.errors import CheckpointError, UsageError
from tests.checkpoint.states import assert_equal, blank, expected, load_all, manager

NAME = "a rün # ? : %20 + 1"  # of a run directory: what addresses and shells have meanings for
VALUES = {"trainer.step": 5, "scheduler.0": {"last_epoch": 3, "factors": [0.1, None, True]}, "note": "ü"}


@pytest.fixture(params=["local", "memory", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "local":
        return str(tmp_path / NAME)
    if request.param == "memory":
        MemoryFileSystem.store.clear()
        MemoryFileSystem.pseudo_dirs[:] = [""]
        return "memory://run"
    return f"{request.getfixturevalue('s3_url')}/{NAME}"


def test_round_trip_on_every_storage(url: str) -> None:
    info = manager(url, generation=3).save(
        1000, {**expected(), **VALUES}, local_values={"data.shard.0": [7]}, about={"mesh": {"dp_shard": 2}}
    )
    assert info.step == 1000 and info.path.startswith(url + "/checkpoints/step-00001000/000003-")
    assert manager(url).newest() == info.path

    fs, path = fsspec.url_to_fs(info.path)
    sizes = {name.rsplit("/", 1)[1]: fs.size(name) for name in fs.find(path)}
    assert sorted(sizes) == [COMMIT, "manifest-00000.json", "shard-00000-of-00001.safetensors"]
    assert info.num_bytes == sizes["shard-00000-of-00001.safetensors"]

    reader = load_all(info.path)
    assert reader.values == {**VALUES, "data.shard.0": [7]}
    assert (reader.step, reader.about) == (1000, {"mesh": {"dp_shard": 2}})
    assert {name: (spec.shape, spec.dtype) for name, spec in reader.tensors.items()} == {
        name: (tuple(tensor.shape), tensor.dtype) for name, tensor in expected().items()
    }
    assert (reader.commit.generation, reader.commit.world_size) == (3, 1)


def test_a_part_of_the_tensors_can_be_loaded_into_any_memory_layout(tmp_path: Path) -> None:
    info = manager(str(tmp_path)).save(1, expected())
    wanted = expected()["model.weight"]
    transposed = torch.zeros(9, 17).t()
    parameter = torch.nn.Parameter(torch.zeros(11))
    CheckpointReader(info.path).load({"model.weight": transposed})
    assert torch.equal(transposed, wanted)
    info = manager(str(tmp_path)).save(2, {"p": torch.arange(11.0)})
    CheckpointReader(info.path).load({"p": parameter})
    assert torch.equal(parameter.detach(), torch.arange(11.0)) and parameter.requires_grad


def test_loading_reads_the_ranges_it_needs_in_few_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {f"layer.{i:02}.{part}": torch.randn(10_000) for i in range(50) for part in ("bias", "weight")}
    info = manager(str(tmp_path)).save(1, state)
    size = info.num_bytes
    runs: list[tuple[int, int]] = []
    read = Ranges.read

    def counted(self: Ranges, wanted: Any) -> Any:
        runs.extend((start, end) for _, start, end in wanted)
        return read(self, wanted)

    monkeypatch.setattr(Ranges, "read", counted)
    CheckpointReader(info.path).load(blank(state))
    assert runs == [(0, size)]
    runs.clear()
    CheckpointReader(info.path).load(blank({name: state[name] for name in ("layer.03.bias", "layer.44.bias")}))
    assert len(runs) == 2 and all(end - start <= 40_000 + 2 * MIN_BLOCK_BYTES for start, end in runs)


@pytest.mark.parametrize("storage", ["local", "s3"])
def test_large_reads_are_cut_and_batched(
    storage: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = str(tmp_path) if storage == "local" else request.getfixturevalue("s3_url")
    state = {f"w{i}": torch.randn(10_000 + i) for i in range(40)}
    info = manager(url).save(1, state)
    for name in ("PART_BYTES", "STEP_BYTES", "REQUEST_BYTES", "UNDER_WAY_BYTES"):
        monkeypatch.setattr(ranges_module, name, MIN_BLOCK_BYTES)
    monkeypatch.setattr(reader_module, "COPY_BYTES", 5000)
    targets = blank(state)
    CheckpointReader(info.path).load(targets)
    assert_equal(targets, state)


# ---- stock torch and safetensors ------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_stock_torch_and_safetensors_read_a_local_checkpoint(tmp_path: Path) -> None:
    info = manager(str(tmp_path)).save(1, expected())
    targets = blank(expected())
    dcp.load(targets, storage_reader=HuggingFaceStorageReader(info.path))
    assert_equal(targets, expected())
    with safe_open(f"{info.path}/shard-00000-of-00001.safetensors", framework="pt") as shard:
        assert_equal({name: shard.get_tensor(name) for name in shard.keys()}, expected())  # noqa: SIM118


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_dcp_load_takes_the_reader_and_casts_nothing(tmp_path: Path) -> None:
    info = manager(str(tmp_path)).save(1, expected())
    targets = blank(expected())
    dcp.load(targets, storage_reader=CheckpointReader(info.path))
    assert_equal(targets, expected())
    other = {"model.one": torch.zeros(1), "model.double": torch.zeros(6, 5)}  # saved as float64
    with pytest.raises(BaseException, match=r"model.double is F64 in .* and torch.float32 here"):
        dcp.load(other, storage_reader=CheckpointReader(info.path))
    assert other["model.one"].item() == 0


# ---- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"model.other": torch.zeros(1)}, "has no tensor 'model.other'"),
        ({"model.weight": torch.zeros(9, 17)}, r"model.weight has shape \[17, 9\] in .* and \[9, 17\] here"),
        ({"model.half": torch.zeros(5, 3, 2)}, r"model.half is torch.bfloat16 in .* and torch.float32 here"),
        ({"model.weight": torch.zeros(17, 9, device="meta")}, "model.weight is on the meta device"),
    ],
)
def test_targets_that_do_not_fit_are_refused_and_the_others_stay(
    tmp_path: Path, wrong: dict[str, Tensor], reason: str
) -> None:
    info = manager(str(tmp_path)).save(1, expected())
    targets = {"model.one": torch.full((1,), 9.0), **wrong}
    with pytest.raises(CheckpointError, match=reason):
        CheckpointReader(info.path).load(targets)
    assert targets["model.one"].item() == 9.0


@pytest.mark.parametrize(
    "value",
    [(1, 2), {1: 2}, float("nan"), {"a": float("inf")}, {1, 2}, object(), b"x"],
    ids=lambda value: str(type(value)),
)
def test_values_that_json_would_change_are_refused_and_nothing_is_left(tmp_path: Path, value: Any) -> None:
    reason = (
        "no checkpoint of step 7 .* rank 0: CheckpointError: the state's callback.mine is a .* pack it .* untouched"
    )
    for kind in ("state", "local_values"):
        with pytest.raises(CheckpointError, match=reason):
            manager(str(tmp_path)).save(7, **{"state": {}, kind: {"callback.mine": value}})
    assert list(tmp_path.rglob("*")) == []


def test_a_tensor_that_cannot_be_held_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"model.odd is torch.complex128.*Correct the state"):
        manager(str(tmp_path)).save(7, {"model.odd": torch.zeros(3, dtype=torch.complex128)})
    assert not list(tmp_path.iterdir())


def test_memory_is_for_one_process() -> None:
    with pytest.raises(UsageError, match="memory:// is for one process, not for 2 ranks"):
        manager("memory://run", rank=0, world_size=2)


# ---- damage ---------------------------------------------------------------------------------------------------------


def shard_of(path: str) -> Path:
    return next(Path(path).glob("shard-*"))


def assert_refused(path: str, reason: str) -> None:
    with pytest.raises(DamagedError, match=reason):
        CheckpointReader(path)


def test_a_truncated_missing_or_grown_shard_is_refused(tmp_path: Path) -> None:
    path = manager(str(tmp_path)).save(1, expected()).path
    shard = shard_of(path)
    whole = shard.read_bytes()
    for data in (whole[:-1], b"", whole + b"x"):
        shard.write_bytes(data)
        assert_refused(path, f"checkpoint {path} is damaged: {shard.name} has {len(data)} of its {len(whole)} bytes")
    shard.unlink()
    assert_refused(path, f"{shard.name} is missing")


@pytest.mark.parametrize("storage", ["local", "s3"])
def test_a_shard_that_is_lost_after_opening_changes_no_target(
    storage: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    url = str(tmp_path) if storage == "local" else request.getfixturevalue("s3_url")
    path = manager(url).save(1, expected()).path
    fs, folder = fsspec.url_to_fs(path)
    shard = f"{folder}/shard-00000-of-00001.safetensors"
    whole = fs.cat_file(shard)
    for data in (whole[:-1], None):
        reader = CheckpointReader(path)
        fs.rm_file(shard) if data is None else fs.pipe_file(shard, data)
        targets = blank(expected())
        with pytest.raises(
            DamagedError,
            match=r"is damaged: (shard-00000-of-00001.safetensors (lacks bytes|is gone)|a shard is gone)",
        ):
            reader.load(targets)
        assert_equal(targets, blank(expected()))
        fs.pipe_file(shard, whole)


def test_damaged_manifests_and_commits_are_refused(tmp_path: Path) -> None:
    path = manager(str(tmp_path)).save(1, expected()).path
    for name, reason in (("manifest-00000.json", "has not the size or the SHA-256"), (COMMIT, "COMMIT is not JSON")):
        file = Path(path, name)
        good = file.read_bytes()
        file.write_bytes(good[:20] + b"\xff" + good[21:])
        assert_refused(path, reason)
        file.write_bytes(good[:-1])
        assert_refused(path, reason)
        file.write_bytes(good)
    Path(path, "manifest-00000.json").unlink()
    assert_refused(path, "manifest-00000.json is missing")
    os.remove(Path(path, COMMIT))
    with pytest.raises(CheckpointError, match="is not a committed checkpoint: it has no COMMIT"):
        CheckpointReader(path)


def test_nothing_in_a_checkpoint_is_a_pickle(tmp_path: Path) -> None:
    path = manager(str(tmp_path)).save(1, {**expected(), **VALUES}, local_values={"a": 1}, about={"b": 2}).path
    for file in Path(path).iterdir():
        data = file.read_bytes()
        json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")] if file.suffix == ".safetensors" else data)
