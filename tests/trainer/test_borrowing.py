"""A new run begins with the weights of another one: fine-tuning."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elastictrain import CheckpointConfig, Task, Trainer, UsageError, Weights
from elastictrain.checkpoint import CheckpointReader, resolve
from elastictrain.errors import CheckpointError
from tests.helpers import run_ranks
from tests.parallel.llama import Llama, Options, whole
from tests.trainer.tasks import Block, Recorded

pytestmark = pytest.mark.filterwarnings("ignore")
CONFIG = CheckpointConfig(every_seconds=None)


class Tuned(Recorded):
    """The same net under another name, and a new head."""

    def configure_model(self) -> None:
        self.net = nn.ModuleDict({"first": nn.Linear(8, 16), "blocks": nn.ModuleList(Block(16) for _ in range(2))})
        self.head = nn.Linear(16, 1)


class Half(Recorded):
    def configure_model(self) -> None:
        super().configure_model()
        self.to(torch.bfloat16)


class Wider(Recorded):
    def configure_model(self) -> None:
        super().configure_model()
        self.last = nn.Linear(16, 3)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    Trainer(run_dir=str(folder), max_steps=3, global_batch_size=24, checkpoint=CONFIG).fit(Recorded())
    return folder


def _begin(task: Task, resume: Any, **options: Any) -> dict[str, Tensor]:
    """The weights with which training begins."""
    Trainer(max_steps=0, global_batch_size=24, resume=resume, **options).fit(task)
    return {name: value.detach().clone() for name, value in task.state_dict().items()}


def _saved(folder: Path) -> dict[str, Tensor]:
    reader = CheckpointReader(resolve(str(folder)))
    names = {name for name in reader.tensors if name.startswith("model.")}
    targets = {name: torch.empty(reader.tensors[name].shape, dtype=reader.tensors[name].dtype) for name in names}
    reader.load(targets)
    return {name.removeprefix("model."): value for name, value in targets.items()}


def test_weights_and_nothing_else(trained: Path, tmp_path: Path) -> None:
    there, fresh = _saved(trained), _begin(Recorded(), "auto")
    begun = _begin(Recorded(), Weights(str(trained)))
    assert begun.keys() == there.keys() and all(torch.equal(begun[name], there[name]) for name in there)
    assert not torch.equal(fresh["first.weight"], there["first.weight"])
    trainer = Trainer(run_dir=str(tmp_path), max_steps=2, global_batch_size=24, resume=Weights(str(trained)))
    trainer.fit(Recorded())
    state = CheckpointReader(resolve(str(tmp_path))).values
    assert (state["trainer.step"], state["data.consumed"]) == (2, 48), "it begins at step 0"


def test_a_run_goes_on_from_its_own(trained: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"run_dir": str(tmp_path), "global_batch_size": 24, "checkpoint": CONFIG}
    Trainer(max_steps=2, resume=Weights(str(trained)), **options).fit(Recorded())
    again, task = Trainer(max_steps=2, resume=Weights(str(trained)), **options), Recorded()
    again.fit(task)
    assert torch.equal(task.last.weight, _saved(tmp_path)["last.weight"])
    assert not torch.equal(task.last.weight, _saved(trained)["last.weight"])


def test_other_names(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fresh, there = _begin(Tuned(), "auto"), _saved(trained)
    tuned = _begin(Tuned(), Weights(str(trained), rename={"": "net."}, strict=False))
    for name, value in tuned.items():
        assert torch.equal(value, there[name.removeprefix("net.")] if name.startswith("net.") else fresh[name]), name
    out = capsys.readouterr().out
    assert "note: not in those weights, and new: head.bias, head.weight" in out
    assert "note: in those weights only, and left out: net.last.bias, net.last.weight" in out


def test_another_dtype(trained: Path) -> None:
    there = _saved(trained)
    for name, value in _begin(Half(), Weights(str(trained), cast=True)).items():
        assert value.dtype == torch.bfloat16 and torch.equal(value, there[name].bfloat16()), name


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        (
            Tuned,
            {},
            "lacks head.bias, head.weight, net.blocks.0.linear.bias and 9 more, unlike this model: give rename=",
        ),
        (Tuned, {"strict": False}, "has no name of this model, which begins with head.bias, head.weight"),
        (Half, {}, "torch.float32 there and torch.bfloat16 here: use cast=True"),
        (
            Wider,
            {},
            "last.weight has shape [1, 16] there and [3, 16] here: rename it to something that this model does",
        ),
        (
            Recorded,
            {"rename": {"blocks.0.": "blocks.1."}},
            "gives blocks.0.linear.bias, blocks.1.linear.bias the same name blocks.1.linear.bias",
        ),
    ],
)
def test_what_does_not_fit(task: Any, options: dict[str, Any], message: str, trained: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        _begin(task(), Weights(str(trained), **options))
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_what_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="name a checkpoint or a run directory"):
        Weights("")
    with pytest.raises(UsageError, match=re.escape("Weights(rename={'a.': None}) must give a prefix for each prefix")):
        Weights("there", rename={"a.": None})  # type: ignore[dict-item]
    with pytest.raises(UsageError, match="there is no committed checkpoint at"):
        _begin(Recorded(), Weights(str(tmp_path)))


class OtherNorm(Llama):
    def build(self) -> None:
        super().build()
        self.norm = nn.RMSNorm(33)


def _on_layouts(rank: int, world_size: int, folder: Path) -> list[dict[str, Tensor]]:
    found = []
    for mesh in ("dp_shard=2", "tp=2", "pp=2"):
        task = Llama(Options())
        Trainer(max_steps=0, global_batch_size=8, mesh=mesh, resume=Weights(str(folder))).fit(task)
        found.append({name: whole(value).detach().clone() for name, value in task.named_parameters()})
    with pytest.raises(
        CheckpointError, match=r"norm.weight has shape \[\d+\] there and \[33\] here"
    ):  # the last stage's
        Trainer(max_steps=0, global_batch_size=8, mesh="pp=2", resume=Weights(str(folder))).fit(OtherNorm(Options()))
    return found


def test_any_layout(tmp_path: Path) -> None:
    Trainer(run_dir=str(tmp_path), max_steps=2, global_batch_size=8, checkpoint=CONFIG).fit(Llama(Options()))
    there = _saved(tmp_path)
    ranks = run_ranks(_on_layouts, 2, tmp_path)
    for layouts in zip(*ranks, strict=True):
        assert {name for rank in layouts for name in rank} == set(there)
        for rank in layouts:
            for name, value in rank.items():
                assert torch.equal(value, there[name]), name
