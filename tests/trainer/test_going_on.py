"""Whether a process goes on in the next generation, and what is seen where it cannot."""

from __future__ import annotations

import gc
import logging
import os
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from elastictrain import Callback, Task, Trainer
from elastictrain import lives as lives_module
from elastictrain.compat.torch import compiled_frames, is_compiled
from elastictrain.config import MeshShape
from elastictrain.elastic import membership as membership_module
from elastictrain.elastic.line import Line, Speaker
from elastictrain.elastic.membership import AgentMembership
from elastictrain.lives import COMPILES, Lives
from elastictrain.origin import Origin
from elastictrain.parallel.mesh import Ranks
from elastictrain.step_plan import StepPlan
from tests.helpers import run_ranks
from tests.trainer.test_lives import be_agent, places


class Small(Task):
    batch_size = 4

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 1)

    def train_dataset(self) -> Any:
        return TensorDataset(torch.ones(8, 2))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0]).sum()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Losing(Callback):
    def on_step_end(self, info: Any) -> None:
        raise RuntimeError("gloo: Connection reset by peer")


def test_models_that_were_trained_can_go() -> None:
    models = []
    for _ in range(2):
        task = Small()
        models.append(weakref.ref(task))
        Trainer(max_steps=1).fit(task)
        del task
    gc.collect()
    assert [model() for model in models] == [None, None]


def agent(folder: str) -> tuple[AgentMembership, Speaker, Any]:
    mine = places(Path(folder), 0, 1, [1, 2])
    speaker = Speaker()
    lives_module._has_trained = False
    membership_module._mine = found = AgentMembership(Line(speaker.descriptor), mine[0])
    return found, speaker, mine


def _cannot_go_on(rank: int, world_size: int, folder: str) -> Any:
    """What was said of a process that fails between two generations."""
    _, speaker, mine = agent(folder)
    threading.Thread(target=be_agent, args=(speaker, 0, 1, mine), daemon=True).start()
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    lives_module.log.addHandler(handler)

    def restore(self: Origin) -> None:
        raise OSError("it has no descriptors left")

    Origin.restore = restore  # type: ignore[method-assign]
    with pytest.raises(OSError, match="no descriptors"):
        Trainer(max_steps=2, callbacks=[Losing()]).fit(Small())
    return said, gc.get_freeze_count()


def test_what_fails_between_two_generations_is_said(tmp_path: Path) -> None:
    why = "OSError: it has no descriptors left"
    said = [f"worker rank 0 could not go on in the next generation, and is replaced: {why}"]
    assert run_ranks(_cannot_go_on, 1, str(tmp_path)) == [(said, 0)]


def _problems(rank: int, world_size: int, folder: str) -> None:
    mine, _, _ = agent(folder)

    def lives() -> Lives:
        lives_module._has_trained = False
        found = Lives(mine, [Losing()], [])
        assert found.problem is None
        return found

    def check(device: str, task: nn.Module | None = None, **axes: int) -> str | None:
        shape = MeshShape(**axes)
        ranks = Ranks(0, shape.world_size, 0, torch.device(device), None, owns_group=True)
        found = lives()
        plan, mesh = StepPlan(), SimpleNamespace(shape=shape)
        found.check(SimpleNamespace(ranks=ranks, mesh=mesh, plan=plan, task=task or nn.Linear(1, 1)))  # type: ignore[arg-type]
        return found.problem

    for axes in ({"tp": 2}, {"cp": 2}):
        assert "DTensor caches" in str(check("cuda", **axes)) and check("cpu", **axes) is None
    assert check("cuda", dp_shard=2) is None
    module = nn.Sequential(nn.Linear(1, 1))
    module[0].compile(backend="eager")
    assert check("cpu", module) == COMPILES
    assert is_compiled(nn.Sequential(torch.compile(nn.Linear(1, 1)))) and not is_compiled(nn.Linear(1, 1))  # type: ignore[arg-type]

    def fail(*_: Any) -> None:
        raise OSError("No space left on device")

    found, error = lives(), RuntimeError("gloo: Connection reset by peer")
    mine.lost_others, lives_module.sever = fail, fail  # type: ignore[method-assign]
    assert not found.goes_on(error)
    assert error.__notes__ == ["then, as that was reported, OSError: No space left on device"]
    assert found.problem == "it cannot report what it has lost"

    found, before = lives(), compiled_frames()
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))
    assert compiled_frames() > before
    assert not found.goes_on(error) and found.problem == COMPILES


@pytest.mark.slow
def test_what_keeps_a_process_from_going_on(tmp_path: Path) -> None:
    os.environ.pop("TORCH_COMPILE_DISABLE", None)
    run_ranks(_problems, 1, str(tmp_path))
