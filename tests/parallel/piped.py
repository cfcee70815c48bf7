"""Models and tasks to cut, and the same training with and without a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import Dataset

from elastictrain import Task
from elastictrain.config import MeshShape
from elastictrain.parallel.clipping import grad_norm
from elastictrain.parallel.mesh import join, leave, make_mesh
from elastictrain.parallel.pipeline import Job, Pipeline
from elastictrain.parallel.relay import random_state
from elastictrain.parallel.schedules import owners
from elastictrain.parallel.stages import shapes_key
from elastictrain.parallel.units import cut_stages
from elastictrain.step_plan import Precision

VOCABULARY, WIDTH = 16, 8


class Block(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.linear, self.dropout = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), dropout

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x + F.dropout(self.linear(self.norm(x)).relu() * mask, self.dropout, self.training)


class Transformer(nn.Module):
    """A mask made of the inputs for every block; optionally a tied head, parameters outside of modules, frozen blocks."""

    def __init__(self, *, tied: bool = False, dropout: float = 0.0, loose: bool = False, frozen: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(8))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.position = nn.Parameter(torch.randn(4, WIDTH)) if loose else None
        self.gain = nn.Parameter(torch.ones(WIDTH)) if loose else None
        for module in (self.embed, *self.blocks[:3]) if frozen else ():
            module.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = (tokens != 3).unsqueeze(-1).float()
        x = self.embed(tokens)
        if self.position is not None and self.gain is not None:
            x, mask = x + self.position, mask * self.gain
        for block in self.blocks:
            x = block(x, mask)
        out: Tensor = self.head(self.norm(x))
        return out


class Mlp(nn.Module):
    """A plain nn.Sequential, of layers that work in place."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        layers = chain.from_iterable((nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True)) for _ in range(7))
        self.net = nn.Sequential(*layers, nn.Linear(WIDTH, VOCABULARY))

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.net(self.embed(tokens))
        return out


class Cnn(nn.Module):
    """BatchNorm, shapes that change on the way, code between modules."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        layers = (
            (nn.Conv1d(4, 4, 3, padding=1), nn.BatchNorm1d(4, momentum=None if i == 2 else 0.1), nn.ReLU(inplace=True))
            for i in range(6)
        )
        self.features = nn.Sequential(*chain.from_iterable(layers), nn.MaxPool1d(2))
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = torch.flatten(self.features(self.embed(tokens)), 1)
        return self.head(x).unsqueeze(1).expand(-1, 4, -1)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "transformer": Transformer,
    "tied": lambda: Transformer(tied=True),
    "dropout": lambda: Transformer(dropout=0.2),
    "loose": lambda: Transformer(loose=True),
    "frozen": lambda: Transformer(frozen=True),
    "mlp": Mlp,
    "cnn": Cnn,
}


def slots_of(step: int, count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(step)
    sequences = torch.randint(0, VOCABULARY, (count, 3, 5), generator=generator)
    return [(slot[:, :-1], slot[:, 1:]) for slot in sequences]


def train(
    rank: int, world_size: int, model: str, shape: MeshShape | None, schedule: str, num_slots: int, steps: int = 4
) -> tuple[list[float], list[float], dict[str, Tensor], Tensor]:
    """Losses and gradient norms of some steps, what this rank then holds, and what the model makes of one slot.

    SGD with momentum, as Adam would hide a gradient of the wrong scale.
    """
    torch.manual_seed(0)
    net = MODELS[model]()
    net.train()
    ranks = join(rank=rank, world_size=world_size, local_rank=rank)
    pipeline: Pipeline | None = None
    if shape is not None:
        at = owners(schedule, pp=shape.pp)
        mesh = make_mesh(ranks, shape, last_stage=at[-1])
        pipeline = Pipeline(net, cut_stages(net, num_stages=len(at), owners=at), mesh, schedule=schedule)
        pipeline.place(lambda part: None, precision=Precision())
    trained = [p for p in net.parameters() if p.requires_grad] or [nn.Parameter(torch.zeros(0))]
    optimizer = torch.optim.SGD(trained, lr=0.05, momentum=0.9)
    losses, norms = [], []
    for step in range(steps):
        slots = slots_of(step, num_slots)
        total = torch.zeros(())

        def loss_of(outputs: Tensor, slot: int, slots: Any = slots, total: Tensor = total) -> Tensor:
            loss = F.cross_entropy(outputs.flatten(0, 1), slots[slot][1].flatten()) / num_slots
            total.add_(loss.detach())
            return loss

        def random(slot: int, step: int = step) -> Tensor:
            torch.manual_seed(1000 * step + slot)
            return random_state(torch.device("cpu"))

        if pipeline is None:
            for index, slot in enumerate(slots):
                random(index)
                loss_of(net(slot[0]), index).backward()
            norms.append(float(grad_norm(p.grad for p in trained if p.grad is not None)))
            losses.append(total.item())
        else:
            mine = range(mesh.dp_rank, num_slots, mesh.dp_size)
            jobs = [Job(index, (slots[index][0],), shapes_key(slots[index]), random(index)) for index in mine]
            pipeline.start(num_slots)
            pipeline.train(jobs, lambda outputs, number, mine=mine, of=loss_of: of(outputs, mine[number]))
            pipeline.finish()
            norms.append(float(pipeline.clip_grad_norm_(trained, 1e9)))
            losses.append(mesh.sum([total.item()])[0])
        optimizer.step()
        optimizer.zero_grad()
    net.eval()
    with torch.no_grad():
        outputs = net(slots_of(99, 1)[0][0])
    held = {name: whole(tensor) for name, tensor in net.state_dict().items()}
    leave(ranks)
    return losses, norms, held, outputs


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


class Tokens(Dataset[Tensor]):
    """52 samples: with a global batch of 16, the last one of an epoch has 4."""

    def __len__(self) -> int:
        return 52

    def __getitem__(self, index: int) -> Tensor:
        return torch.randint(0, VOCABULARY, (5,), generator=torch.Generator().manual_seed(index))


class PipedTask(Task):
    """A transformer with dropout and a tied head, weights made by name; all that a pipeline needs and no more."""

    def __init__(self, *, optimizer: str = "sgd", dropout: float = 0.1, tied: bool = True) -> None:
        super().__init__()
        self.optimizer, self.dropout, self.tied = optimizer, dropout, tied

    def configure_model(self) -> None:
        if hasattr(self, "net"):
            return
        self.net = Transformer(tied=self.tied, dropout=self.dropout)

    def inputs(self, batch: Tensor) -> Tensor:
        return batch[:, :-1]

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.net(tokens)
        return out

    def loss(self, outputs: Tensor, batch: Tensor) -> Tensor:
        return F.cross_entropy(outputs.flatten(0, 1), batch[:, 1:].flatten())

    def train_dataset(self) -> Any:
        return Tokens()

    def val_dataset(self) -> Any:
        return Tokens()

    def predict_dataset(self) -> Any:
        return Tokens()

    def configure_optimizers(self) -> Any:
        if self.optimizer == "sgd":
            made: Any = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        else:
            made = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.LambdaLR(made, lambda step: min(1.0, (step + 1) / 5))
        return {"optimizer": made, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
