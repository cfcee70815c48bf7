"""A task whose workers die where they are told to, each death once; it writes down what its state and its samples were."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import Dataset

from elastictrain import Task
from elastictrain.parallel.mesh import sever
from tests.parallel.lm import DIM, VOCAB, Block
from tests.processes import FORKED, children_of

NUM_SAMPLES, LENGTH = 48, 8


_task: Lives | None = None  # of this process: a pipeline runs blocks, and no forward of the task


class Mortal(Block):
    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        if self.training and _task is not None:
            _task.die("forward")
            if out.requires_grad:
                out.register_hook(lambda _gradient: _task.die("backward"))
        return out


def workers_of(agent: int) -> list[int]:
    """Its processes, spares too."""
    return sorted(children_of(agent, running="elastictrain.cli.worker") + children_of(agent, running=FORKED))


class Samples(Dataset[Tensor]):
    """The first token of a sample is its number."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        tokens = torch.randint(VOCAB, (LENGTH + 1,), generator=torch.Generator().manual_seed(index))
        tokens[0] = index
        return tokens


class Lives(Task):
    """
    Args:
        folder: where everything is written down.
        deaths: ``RANK:STEP:WHERE``, ``RANK:STEP:WHERE``, …: in the step after so many; WHERE is "forward", "backward",
            "optimizer", "validation", "save", "build" or "restore", the last two of a generation that is not the first.
            With a fourth part it does something else: it is stopped ("stop"), sleeps ("sleep"), loses the others
            ("lose"), dies when there is a spare ("spare"), or dies once its agent is stopped ("frozen").
        early: the weights are made in ``__init__``.
    """

    batch_size = 8

    def __init__(self, folder: str, deaths: str = "", early: bool = False) -> None:
        super().__init__()
        global _task
        _task = self
        self.folder, self.is_early = Path(folder), early
        self.deaths = [one.split(":") for one in deaths.split(",") if one]
        if early:
            self._make()

    def _make(self) -> None:
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(Mortal() for _ in range(2))
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def setup(self, stage: str) -> None:
        drawn = torch.randperm(1000)[0], np.random.randint(1000), random.randrange(1000)
        with open(self.folder / "drawn", "a") as file:
            file.write(f"{os.environ['RANK']} {' '.join(str(int(one)) for one in drawn)}\n")

    def teardown(self, stage: str) -> None:
        with open(self.folder / "torn-down", "a") as file:
            file.write(f"{os.environ['RANK']} {os.getpid()}\n")

    def configure_model(self) -> None:
        self.die("build")
        if not self.is_early:
            self._make()

    def pipeline_units(self) -> list[str]:
        return [f"blocks.{i}" for i in range(len(self.blocks))]

    def tensor_parallel_plan(self) -> dict[str, Any]:
        ends = {"embed": "embedding_rowwise", "head": "colwise_gather_output"}
        ways = {"up": "colwise", "down": "rowwise"}
        return ends | {f"blocks.*.{name}": way for name, way in ways.items()}

    def train_dataset(self) -> Any:
        return Samples()

    def val_dataset(self) -> Any:
        return Samples()

    def collate_fn(self, samples: list[Tensor]) -> tuple[Tensor, Tensor]:
        batch = torch.stack(samples)
        return batch[:, :-1].clone(), batch[:, 1:].clone()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(outputs.flatten(0, 1), batch[1].flatten())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.die("validation")
        self.log("val/loss", self.loss(self(batch[0]), batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        task = self

        class Dying(torch.optim.AdamW):
            def step(self, *args: Any, **kwargs: Any) -> Any:
                result = super().step(*args, **kwargs)
                task.die("optimizer")
                return result

        return Dying(self.parameters(), lr=1e-2)

    # ---- deaths ------------------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: Any) -> None:
        self.die("save")

    def on_load_checkpoint(self, checkpoint: Any) -> None:
        self.die("restore")

    def die(self, where: str) -> None:
        is_first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        step = str(self.global_step) if self._trainer is not None else "-"
        for i, (rank, when, place, *how) in enumerate(self.deaths):
            is_due = place == where and rank == os.environ["RANK"] and (when in (step, "*"))
            if is_due and not (is_first and where in ("build", "restore")) and self._once(i):
                self._end(how[0] if how else "")

    def _end(self, how: str) -> None:
        while how == "spare" and len(workers_of(os.getppid())) < 3:
            time.sleep(0.05)
        if how == "sleep":
            time.sleep(1000.0)
        if how == "frozen":
            os.kill(os.getppid(), signal.SIGSTOP)
        if how == "lose":
            sever()
        else:
            os.kill(os.getpid(), signal.SIGSTOP if how == "stop" else signal.SIGKILL)

    def _once(self, number: int) -> bool:
        try:
            (self.folder / f"death-{number}").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    # ---- what is written down ------------------------------------------------------------------------------------------

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Once for each microbatch of a step."""
        step, rank = self.global_step, os.environ["RANK"]
        generation = os.environ["TORCHELASTIC_RESTART_COUNT"]
        with open(self.folder / f"samples-{rank}", "a") as file:
            file.write(f"{generation} {step} {' '.join(map(str, batch[0][:, 0].tolist()))}\n")
        with open(self.folder / f"states-{rank}", "a") as file:
            file.write(f"{generation} {step} {os.getpid()} {self._digest()}\n")

    def _digest(self) -> str:
        tensors: list[Tensor] = [weight.detach() for weight in self.parameters()]
        optimizer: Any = self.optimizers()
        for weight in self.parameters():
            state = optimizer.state.get(weight, {})
            tensors += [state[name] for name in sorted(state) if isinstance(state[name], Tensor)]
        local = [one.to_local() if isinstance(one, DTensor) else one for one in tensors]
        return hashlib.sha256(b"".join(one.contiguous().numpy().tobytes() for one in local)).hexdigest()[:16]
