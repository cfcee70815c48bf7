"""The stages of ZeRO: the numbers of one process, whatever the stage; state that goes from one to another; refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from elastictrain import MeshConfig, Task, Trainer, UsageError
from elastictrain.callbacks import EMA, GradientClipping
from tests.helpers import apart, run_ranks
from tests.parallel.llama import Seen, steps_of, variant

pytestmark = pytest.mark.filterwarnings("ignore")

# Five slots, so that some ranks have one and others two, with validations on averaged weights in between.
OPTIONS = variant(optimizer="adamw", frozen=("layers.0.n1",))
SIZES: dict[str, Any] = {"global_batch_size": 10, "val_every": 2}
MESHES = [
    "dp_shard=4,zero=1",
    "dp_shard=4,zero=2",
    "dp_replicate=2,dp_shard=2,zero=1",
    "dp_replicate=2,dp_shard=2,zero=2",
]
CHAIN = [MESHES[0], MESHES[3], "dp_shard=4"]  # two steps each


def _run(mesh: str, steps: int, run_dir: Path | None) -> Seen:
    return steps_of(OPTIONS, mesh, steps, run_dir, callbacks=[EMA(decay=0.5), GradientClipping(norm=0.3)], **SIZES)


def _one(rank: int, world_size: int, run_dir: Path | None) -> list[Seen]:
    return [_run("auto", 8, run_dir)]


def _four(rank: int, world_size: int, run_dir: Path) -> tuple[list[Seen], list[Seen]]:
    alone = [_run(mesh, 5, None) for mesh in MESHES[1:3]]
    return alone, [_run(mesh, 2 * leg + 2, run_dir) for leg, mesh in enumerate(CHAIN)]


@pytest.mark.slow
def test_every_stage_has_the_numbers_of_one_process_and_loads_what_another_saved(tmp_path: Path) -> None:
    ((one,),) = run_ranks(_one, 1, None)
    for alone, chain in run_ranks(_four, 4, tmp_path, timeout=150):
        for seen in alone:
            assert sorted(seen.losses) == [1, 2, 3, 4, 5]
            assert max(apart(loss, one.losses[step]) for step, loss in seen.losses.items()) <= 1e-6
            assert seen.norms[:5] == pytest.approx(one.norms[:5], rel=1e-6, abs=1e-6)
        for leg, seen in enumerate(chain):
            assert sorted(seen.losses) == [2 * leg + 1, 2 * leg + 2]
            assert max(apart(loss, one.losses[step]) for step, loss in seen.losses.items()) <= 1e-6
    ((last,),) = run_ranks(_one, 1, tmp_path)
    assert sorted(last.losses) == [7, 8]
    assert max(apart(loss, one.losses[step]) for step, loss in last.losses.items()) <= 1e-6


class ByHand(Task):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.net = nn.Linear(2, 2)

    def train_dataset(self) -> Any:
        return torch.zeros(4, 2)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_refusals() -> None:
    with pytest.raises(UsageError, match="zero=4 is not a stage of ZeRO: use 1, 2 or 3"):
        MeshConfig.parse("dp_shard=2,zero=4")
    with pytest.raises(UsageError, match="zero=2 shares state over the mesh axis dp_shard: add dp_shard=-1"):
        MeshConfig(zero=2)
    with pytest.raises(UsageError, match="zero=2 with pp=2: .* which is zero=1"):
        MeshConfig(dp_shard=2, pp=2, zero=2)
    assert MeshConfig(dp_shard=2, pp=2).resolve(4) == MeshConfig(dp_shard=2, pp=2, zero=1).resolve(4)
    assert str(MeshConfig.parse(str(MeshConfig(dp_shard=2, zero=1))).resolve(2)) == "dp_shard=2, zero=1"
    assert str(MeshConfig(dp_shard=-1, zero=1).resolve(1)) == "one rank"
    with pytest.raises(UsageError, match="ByHand has manual optimisation, .* zero=3, or automatic optimisation"):
        Trainer(max_steps=1, mesh=MeshConfig(dp_shard=-1, zero=2)).fit(ByHand())
