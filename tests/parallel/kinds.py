"""Small models of many kinds as tasks, none of which the library knows by name."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel
from torch.utils.data import Dataset

from elastictrain import Task

DIM, HEADS, SEQ, VOCAB = 32, 4, 12, 48


class Tokens(Dataset[Tensor]):
    """Sequences that count in twos from anywhere, int64 of (SEQ + 1,)."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Tensor:
        start = torch.randint(VOCAB, (), generator=torch.Generator().manual_seed(index))
        return (start + 2 * torch.arange(SEQ + 1)) % VOCAB


class Images(Dataset[tuple[Tensor, Tensor]]):
    """Noise with a bright quarter, and which of the four it is."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        label = index % 4
        image = torch.randn(1, 8, 8, generator=torch.Generator().manual_seed(index))
        image[:, 4 * (label // 2) :, 4 * (label % 2) :][:, :4, :4] += 2.0
        return image, torch.tensor(label)


class Trained(Task):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)


# ---- plain networks -------------------------------------------------------------------------------------------------


class Classifier(Trained):
    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(outputs, batch[1])

    def train_dataset(self) -> Images:
        return Images()


class Mlp(Classifier):
    def configure_model(self) -> None:
        layers = (nn.Linear(64, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 24), nn.BatchNorm1d(24), nn.ReLU())
        self.net = nn.Sequential(nn.Flatten(), *layers, nn.Linear(24, 4))

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.net(images)
        return logits


class Cnn(Classifier):
    """Residual stages that differ in width, code between modules."""

    def configure_model(self) -> None:
        self.stem, self.norm = nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.stages = nn.ModuleList(
            nn.Sequential(nn.Conv2d(width, 2 * width, 3, padding=1, stride=2), nn.BatchNorm2d(2 * width), nn.ReLU())
            for width in (8, 16)
        )
        self.head = nn.Linear(32, 4)

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(images)))
        for stage in self.stages:
            x = stage(x)
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits


# ---- language models ------------------------------------------------------------------------------------------------


class LanguageModel(Trained):
    def inputs(self, batch: Tensor) -> Tensor:
        return batch[:, :-1]

    def loss(self, outputs: Tensor, batch: Tensor) -> Tensor:
        return F.cross_entropy(outputs.flatten(0, 1), batch[:, 1:].flatten())

    def train_dataset(self) -> Tokens:
        return Tokens()


class EncoderDecoder(LanguageModel):
    """Every layer of the decoder looks at what the encoder has made of the sequence backwards."""

    def configure_model(self) -> None:
        options: dict[str, Any] = {"dim_feedforward": 48, "dropout": 0.0, "batch_first": True}
        self.source, self.target = nn.Embedding(VOCAB, DIM), nn.Embedding(VOCAB, DIM)
        self.encoder = nn.ModuleList(nn.TransformerEncoderLayer(DIM, HEADS, **options) for _ in range(3))
        self.decoder = nn.ModuleList(nn.TransformerDecoderLayer(DIM, HEADS, **options) for _ in range(2))
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        memory = self.source(tokens.flip(1))
        for layer in self.encoder:
            memory = layer(memory)
        x, mask = self.target(tokens), nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        for layer in self.decoder:
            x = layer(x, memory, tgt_mask=mask, tgt_is_causal=True)
        logits: Tensor = self.head(x)
        return logits


class InOrder(EncoderDecoder):
    """With the units in the order of the calls."""

    def pipeline_units(self) -> list[str]:
        return ["source", *(f"encoder.{i}" for i in range(3)), "target", *(f"decoder.{i}" for i in range(2)), "head"]


class Attention(nn.Module):
    """With norms of each head, as Qwen 3 has them."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(DIM, DIM, bias=False) for _ in range(3))
        self.query_norm, self.key_norm = nn.RMSNorm(DIM // HEADS), nn.RMSNorm(DIM // HEADS)
        self.out = nn.Linear(DIM, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one(x).unflatten(-1, (-1, DIM // HEADS)) for one in (self.query, self.key, self.value))
        q, k, v = (t.transpose(1, 2) for t in (self.query_norm(q), self.key_norm(k), v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(-2))
        return out


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 2 * DIM, bias=False), nn.Linear(2 * DIM, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.up(x)))
        return out


class Mixture(nn.Module):
    """Each token goes to two experts; one that no token goes to does not run."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(DIM, num_experts, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(num_experts))
        self.spare = nn.Linear(DIM, DIM)  # nothing uses it, and no mesh may decay it

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weights, chosen = self.gate(flat).softmax(-1).topk(2)
        out = torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            token, place = (chosen == index).nonzero(as_tuple=True)
            if len(token):
                out = out.index_add(0, token, expert(flat[token]) * weights[token, place, None])
        return out.view_as(x)


class Block(nn.Module):
    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.attention = Attention()
        self.mlp = Mixture(num_experts) if num_experts else Expert()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Decoder(LanguageModel):
    num_experts = 0

    def configure_model(self) -> None:
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(Block(self.num_experts) for _ in range(2))
        self.norm, self.head = nn.RMSNorm(DIM), nn.Linear(DIM, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        for name, parameter in self.named_parameters():
            nn.init.normal_(parameter, 1.0, 0.1) if "norm" in name else nn.init.normal_(parameter, std=0.2)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def tensor_parallel_plan(self) -> dict[str, Any]:
        return {
            "embed": "embedding_rowwise",
            "blocks.*.attention.query": "colwise",
            "blocks.*.attention.key": "colwise",
            "blocks.*.attention.value": "colwise",
            "blocks.*.attention.*_norm": "replicated_with_grad_allreduce",
            "blocks.*.attention.out": "rowwise",
            "blocks.*.mlp.up": "colwise",
            "blocks.*.mlp.down": "rowwise",
            "head": "colwise_gather_output",
        }


class SplitSequence(Decoder):
    """Norms work on a part of the sequence, a plain tensor; what is whole gets a part of its gradient."""

    def tensor_parallel_plan(self) -> dict[str, Any]:
        gathered = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
        return {
            **super().tensor_parallel_plan(),
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "blocks.*.attention_norm": "replicated_with_grad_allreduce",
            "blocks.*.mlp_norm": "replicated_with_grad_allreduce",
            "blocks.*.attention": gathered,
            "blocks.*.mlp": gathered,
            "blocks.*.attention.out": RowwiseParallel(output_layouts=Shard(1)),
            "blocks.*.mlp.down": RowwiseParallel(output_layouts=Shard(1)),
            "norm": "replicated_with_grad_allreduce",
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        }


class TwoOptimizers(Decoder):
    """One step of each after one backward pass, by hand; gradients that are sums wait for the second."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        norms = [parameter for name, parameter in self.named_parameters() if "norm" in name]
        others = [parameter for name, parameter in self.named_parameters() if "norm" not in name]
        return [torch.optim.SGD(parameters, lr=0.1, momentum=0.9) for parameters in (others, norms)]

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        loss = self.loss(self(self.inputs(batch)), batch)
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()
        self.log("train/loss", loss, sync_dist=True)


class MixtureOfExperts(Decoder):
    num_experts = 4

    def tensor_parallel_plan(self) -> dict[str, Any]:
        plan = {name: style for name, style in super().tensor_parallel_plan().items() if ".mlp." not in name}
        return {**plan, "blocks.*.mlp.experts.*.up": "colwise", "blocks.*.mlp.experts.*.down": "rowwise"}


KINDS: dict[str, type[Task]] = {
    "mlp": Mlp,
    "cnn": Cnn,
    "encoder-decoder": EncoderDecoder,
    "in-order": InOrder,
    "decoder": Decoder,
    "split-sequence": SplitSequence,
    "two-optimizers": TwoOptimizers,
    "mixture": MixtureOfExperts,
}


def make(kind: str) -> Task:
    return KINDS[kind]()
