"""The task of :mod:`tests.matrix`: what it writes down of its state is the same whatever mesh it is laid out over.

Each rank notes a number for each box of a tensor that it holds: the sum, over the elements, of a hash of their bits and
their place in the whole tensor. Boxes that make up a tensor therefore add up to the number of the tensor.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from elastictrain.checkpoint.plan import Planner
from elastictrain.elastic.membership import current
from tests.cli.lives_task import Lives
from tests.processes import children_of

Box = tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]  # name, shape of the whole, offsets, lengths

_places: dict[Box, np.ndarray[Any, Any]] = {}  # of a box's elements in the whole tensor


class Whole(Lives):
    """
    Args:
        lr: so small that rounding does not grow from step to step.
    """

    def __init__(self, folder: str, lr: float = 1e-4) -> None:
        super().__init__(folder)
        self.lr = lr
        self._boxes: tuple[int, list[Box]] = (-1, [])
        self._noted = -1

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = super().configure_optimizers()
        for group in optimizer.param_groups:
            group.update(lr=self.lr, eps=1e-4)
        return optimizer

    # ---- traps: whoever comes by there first does what it says ---------------------------------------------------------
    #
    # "worker", "node": it dies, alone or with its node; "PID", "PID stopped": it kills or stops that process;
    # "machine PID": the first one of that agent stops all of its node.

    def setup(self, stage: str) -> None:
        self._spring("setup")
        super().setup(stage)

    def teardown(self, stage: str) -> None:
        super().teardown(stage)
        self._spring("teardown")

    def die(self, where: str) -> None:
        self._spring(where)

    def _spring(self, where: str) -> None:
        trap, sprung = self.folder / f"trap-{where}", self.folder / f"sprung-{os.getpid()}"
        try:
            what, *more = trap.read_text().split()
            if what == "machine" and more != [str(os.getppid())]:
                return
            if what.isdigit():  # another process than this one, before anybody has come by
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(what), signal.SIGSTOP if more else signal.SIGKILL)
            trap.rename(sprung)
        except FileNotFoundError:
            return
        if what.isdigit():
            return
        agent, number = os.getppid(), signal.SIGSTOP if what == "machine" else signal.SIGKILL
        for pid in [*children_of(agent), agent] if what in ("node", "machine") else []:
            if pid != os.getpid():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        os.kill(os.getpid(), number)

    # ---- what is written down ------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: Any) -> None:
        super().on_save_checkpoint(checkpoint)
        if current().stopped is not None:
            self._spring("hand-over")
        self._note_state()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._note_state()  # that was restored, or saved just now
        step, rank, generation = self.global_step, os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
        with open(self.folder / f"samples-{rank}", "a") as file:
            file.write(f"{generation} {step} {' '.join(map(str, batch[0][:, 0].tolist()))}\n")

    def _note_state(self) -> None:
        """Once for each step."""
        step, rank, generation = self.global_step, os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
        if step != self._noted:
            self._noted = step
            numbers = ",".join(self._numbers(rank, generation))
            with open(self.folder / f"states-{rank}", "a") as file:
                file.write(f"{generation} {step} {os.getpid()} {numbers}\n")

    def _numbers(self, rank: str, generation: str) -> list[str]:
        tensors: dict[str, Tensor] = {}
        optimizer: Any = self.optimizers()
        for name, weight in self.named_parameters():
            tensors[name] = weight.detach()
            for key, value in optimizer.state.get(weight, {}).items():
                tensors[f"{name}/{key}"] = value
        if self._boxes[0] != len(tensors):
            items = Planner().local_plan(tensors, is_main=True).items
            chunks = [(one.index.fqn, one.tensor_data) for one in items if one.tensor_data is not None]
            boxes = [(name, tuple(d.size), tuple(d.chunk.offsets), tuple(d.chunk.sizes)) for name, d in chunks]
            self._boxes = len(tensors), boxes
            with open(self.folder / f"boxes-{rank}", "a") as file:
                file.write(f"{generation} {len(boxes)} {json.dumps(boxes)}\n")
        return [f"{number(box, tensors[box[0]]):x}" for box in self._boxes[1]]


def number(box: Box, tensor: Tensor) -> int:
    """Of the box that this rank holds of the tensor."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    bits = local.contiguous().flatten().view(torch.int32).numpy().view(np.uint32).astype(np.uint64)
    with np.errstate(over="ignore"):
        mixed = bits + (_place(box) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return int((mixed ^ (mixed >> np.uint64(31))).sum(dtype=np.uint64))


def _place(box: Box) -> np.ndarray[Any, Any]:
    if box not in _places:
        _, shape, offsets, lengths = box
        place = np.zeros(lengths, dtype=np.uint64)
        for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
            along = (np.arange(length) + offset) * math.prod(shape[dim + 1 :])
            place += along.astype(np.uint64).reshape([-1 if i == dim else 1 for i in range(len(shape))])
        _places[box] = place.flatten()
    return _places[box]
