"""Context parallelism: the numbers of one process from parts of sequences, in every mesh that it goes with; refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset

from elastictrain import CheckpointConfig, MeshConfig, Task, Trainer, UsageError
from elastictrain.callbacks import ActivationCheckpointing, Compile, GradientClipping
from elastictrain.parallel import attention, positions
from elastictrain.parallel.context import Context
from tests.helpers import apart, run_ranks
from tests.parallel.llama import Losses, whole

pytestmark = pytest.mark.filterwarnings("ignore")

SEQ, DIM, HEADS, VOCAB = 16, 32, 4, 48


class Block(nn.Module):
    """Grouped heads and learned positions; ``wrong`` makes each mistake that a model can make."""

    def __init__(self, wrong: str, *, is_causal: bool) -> None:
        super().__init__()
        self.wrong, self.is_causal = wrong, is_causal
        self.norm, self.wq, self.wo = nn.RMSNorm(DIM), nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.wk, self.wv = nn.Linear(DIM, DIM // 2, bias=False), nn.Linear(DIM, DIM // 2)
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (w(y).unflatten(-1, (-1, DIM // HEADS)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        attend: Any = F.scaled_dot_product_attention if self.wrong == "attention" else attention
        mixed = attend(q, k, v, is_causal=self.is_causal, enable_gqa=True)
        x = x + self.wo(mixed.transpose(1, 2).flatten(-2))
        return x + self.down(F.silu(self.up(x)))


class Samples(Dataset[Any]):
    """Tokens, of which some count; an entry that no rank shares with others."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.randint(VOCAB, (SEQ + 1,), generator=torch.Generator().manual_seed(index))
        targets = tokens[1:].clone()
        if index % 3:
            targets[4:12] = -100  # the second of two ranks has the middle, and nothing of it
        if index % 3 == 2:
            targets[:2] = -100
        return {"tokens": tokens[:-1], "targets": targets, "id": torch.tensor(index)}


class Masked(Task):
    """A loss over some tokens only: in a part of a sequence there may be none."""

    batch_size = 8

    def __init__(self, wrong: str = "") -> None:
        super().__init__()
        self.wrong, self.norms, self.drawn = wrong, [], 0.0

    def configure_model(self) -> None:
        self.embed, self.place = nn.Embedding(VOCAB, DIM), nn.Embedding(SEQ, DIM)
        self.blocks = nn.ModuleList(Block(self.wrong, is_causal=causal) for causal in (True, False, True))
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def tensor_parallel_plan(self) -> dict[str, Any]:
        cut = {f"blocks.*.{name}": "colwise" for name in ("wq", "wk", "wv", "up")}
        return {**cut, "blocks.*.wo": "rowwise", "blocks.*.down": "rowwise", "head": "colwise_loss_parallel"}

    def context_parallel_plan(self) -> dict[Any, int] | None:
        return None if self.wrong == "plan" else {"tokens": 1, "targets": 1 if self.wrong != "batch" else 2}

    def inputs(self, batch: Any) -> Tensor:
        return batch["tokens"]

    def forward(self, tokens: Tensor) -> Tensor:
        num = tokens.shape[1]
        at = torch.arange(num) if self.wrong == "positions" else positions(num, device=tokens.device)
        x = self.embed(tokens) + self.place(at)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        return F.cross_entropy(outputs.flatten(0, 1), batch["targets"].flatten(), ignore_index=-100)

    def loss_weight(self, batch: Any) -> int | None:
        return None if self.wrong == "weight" else int((batch["targets"] != -100).sum())

    def train_dataset(self) -> Any:
        return Samples()

    def val_dataset(self) -> Any:
        return Subset(Samples(), range(6))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits = self(batch["tokens"])
        loss, weight = self.loss(logits, batch), self.loss_weight(batch)
        self.log("val/loss", torch.nan_to_num(loss), batch_size=weight or 1e-9)  # type: ignore[arg-type]
        self.log("val/tokens", float(weight or 0), reduce_fx="sum")

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.drawn = torch.rand(()).item()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        grads = [whole(p.grad).double() for p in self.parameters() if p.grad is not None]
        self.norms.append(torch.stack([grad.square().sum() for grad in grads]).sum().sqrt().item())


def _fit(mesh: str, *, wrong: str = "", steps: int = 5, run_dir: Path | None = None, callbacks: Any = ()) -> Any:
    task, losses = Masked(wrong), Losses()
    trainer = Trainer(
        run_dir=None if run_dir is None else str(run_dir),
        max_steps=steps,
        mesh=mesh,
        global_batch_size=6,
        micro_batch_size=2,
        log_every=1,
        val_every=4,
        callbacks=[losses, GradientClipping(norm=0.5), *callbacks],
        checkpoint=CheckpointConfig(every_seconds=None),
    )
    trainer.fit(task)
    validated = {name: value for name, value in trainer.metrics.items() if name.startswith("val/")}
    return losses.values, task.norms, validated, task.drawn


def _one(rank: int, world_size: int, run_dir: Path | None, steps: int) -> Any:
    return _fit("auto", run_dir=run_dir, steps=steps)


def _meshes(rank: int, world_size: int, run_dir: Path) -> Any:
    found = {mesh: _fit(mesh) for mesh in ("dp_shard=2,cp=2", "cp=2,tp=2", "cp=4,zero=1")}
    found["recomputed"] = _fit("dp_replicate=2,cp=2", callbacks=[ActivationCheckpointing()])
    refused = {}
    for wrong in ("attention", "positions", "weight", "batch"):
        with pytest.raises(UsageError) as error:
            _fit("dp_shard=2,cp=2", wrong=wrong)
        refused[wrong] = str(error.value)
    with pytest.raises(UsageError) as error:
        _fit("cp=-1", wrong="plan")
    refused["plan"] = str(error.value)
    return found, refused, _fit("dp_shard=2,cp=2", run_dir=run_dir, steps=3)


@pytest.mark.slow
def test_the_numbers_of_one_process_and_what_would_not_have_them(tmp_path: Path) -> None:
    """Three slots, so that a group without one takes part as well."""
    ((losses, norms, validated, _),) = run_ranks(_one, 1, None, 5)
    ranks = run_ranks(_meshes, 4, tmp_path, timeout=150)
    for found, refused, (begun, *_) in ranks:
        for mesh, (theirs, their_norms, their_validated, _) in found.items():
            assert theirs.keys() == losses.keys(), mesh
            assert max(apart(theirs[step], loss) for step, loss in losses.items()) <= 1e-6, mesh
            assert their_norms == pytest.approx(norms, rel=2e-6, abs=2e-6), mesh
            assert their_validated == pytest.approx(validated, rel=2e-6, abs=2e-6), mesh
        assert begun == pytest.approx({step: losses[step] for step in (1, 2, 3)}, rel=1e-6, abs=1e-6)
        assert refused["attention"].startswith("mesh axis cp=2: Masked never calls elastictrain.parallel.attention")
        for wrong in ("positions", "weight"):
            assert "Masked computes other gradients from parts of a sequence than from all of it, by" in refused[wrong]
        assert (
            "names 'targets' with dim 2, and the batch is a mapping of tokens, targets, id without" in refused["batch"]
        )
        assert refused["plan"].startswith("mesh axis cp=-1: Masked has no context_parallel_plan(): define Masked.con")
    drawn = [found["cp=2,tp=2"][3] for found, *_ in ranks]
    assert drawn[0] == drawn[1] != drawn[2] == drawn[3], "other random numbers for other tokens, the same for the same"
    ((resumed, *_),) = run_ranks(_one, 1, tmp_path, 5)
    assert resumed == pytest.approx({step: losses[step] for step in (4, 5)}, rel=1e-6, abs=1e-6)


def test_without_ranks_it_is_torchs_own() -> None:
    q, k, v = (torch.randn(2, 4, 6, 8) for _ in range(3))
    mask = torch.rand(6, 6) > 0.2
    for options in ({"is_causal": True}, {"attn_mask": mask}, {"scale": 0.3}):
        assert torch.equal(attention(q, k, v, **options), F.scaled_dot_product_attention(q, k, v, **options))
    assert positions(5).tolist() == [0, 1, 2, 3, 4]


def test_a_part_of_a_batch() -> None:
    context = Context({0: 1, 1: -1}, group=None, rank=1, size=2)  # type: ignore[arg-type]
    batch = (torch.arange(16).view(2, 8), torch.arange(8).view(1, 8), "kept")
    tokens, targets, kept = context.part(batch)
    assert (tokens.tolist(), targets.tolist(), kept) == ([[2, 3, 4, 5], [10, 11, 12, 13]], [[2, 3, 4, 5]], "kept")
    counts = torch.zeros(2, 1024)
    counts[0, 600:700] = 1.0
    for weigh, start in ((lambda batch: batch[1].sum(), 512), (lambda batch: None, 0)):
        tokens, _ = context.shortened((torch.arange(2048).view(2, 1024), counts), weigh)
        assert torch.equal(tokens[0], torch.arange(start, start + 256)), "the stretch that counts most"
    with context.active():
        assert positions(4).tolist() == [2, 3, 4, 5]
        with pytest.raises(UsageError, match="attn_mask"):
            attention(*(torch.zeros(1, 1, 2, 2),) * 3, attn_mask=torch.ones(2, 4))
        with pytest.raises(UsageError, match="2 queries and 4 keys are not the tokens of one sequence"):
            attention(torch.zeros(1, 1, 2, 2), torch.zeros(1, 1, 4, 2), torch.zeros(1, 1, 4, 2))
    with pytest.raises(UsageError, match="6 tokens in a sequence, not a multiple of 4, twice .* cp=2: pad to 8"):
        context.part((torch.zeros(1, 6), torch.zeros(1, 6)))
    with pytest.raises(UsageError, match=r"different numbers of tokens, \{0: 8, 1: 4\}: .*shift the targets"):
        context.part((torch.zeros(1, 8), torch.zeros(1, 4)))
    with pytest.raises(UsageError, match="the batch is a Tensor without such a tensor: name entries of a tuple"):
        context.part(torch.zeros(1, 8))


def test_what_is_refused_before_ranks_meet() -> None:
    with pytest.raises(UsageError, match="cp and pp do not go together"):
        MeshConfig(cp=2, pp=2)
    manual = Masked()
    manual.automatic_optimization = False
    norm = Masked()
    norm.norm = nn.BatchNorm1d(4)
    for task, callbacks, message in (
        (manual, [], "Masked has manual optimisation"),
        (norm, [], "norm would have the statistics of a part"),
        (Masked(), [Compile(backend="eager")], "Compile cannot compile an attention"),
    ):
        with pytest.raises(UsageError, match=f"mesh axis cp=2: {message}"):
            Trainer(max_steps=1, mesh="cp=2", callbacks=callbacks).fit(task)
    with pytest.raises(UsageError, match="mesh axis cp=2: predictions would be of parts"):
        Trainer(mesh="cp=2").predict(Masked())
