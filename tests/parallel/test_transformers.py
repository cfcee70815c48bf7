"""Models of transformers as tasks: the numbers of one process on any mesh, their own plans, and what is refused.

Tiny models from config classes; nothing is downloaded.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from elastictrain import CheckpointConfig, Trainer, UsageError
from elastictrain.callbacks import EMA
from elastictrain.checkpoint import CheckpointReader, resolve
from elastictrain.checkpoint.export import export
from elastictrain.compat.transformers import description
from elastictrain.own_plan import own_plan
from elastictrain.parallel.build import configure
from elastictrain.parallel.deferred import record
from elastictrain.parallel.plans import read_plan
from tests.helpers import run_ranks
from tests.parallel.fits import check, refusals
from tests.parallel.kinds import VOCAB, LanguageModel

pytestmark = pytest.mark.filterwarnings("ignore")

LLAMA = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
    "pad_token_id": None,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
GPT2 = {
    "vocab_size": VOCAB,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "initializer_range": 0.1,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
BERT = {
    **{name: LLAMA[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")},
    "num_attention_heads": 4,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
T5 = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 4,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
}
MLA = {
    **LLAMA,
    "num_key_value_heads": 4,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "first_k_dense_replace": 2,
}
SLIDING = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**LLAMA),
    "qwen2": lambda: transformers.Qwen2Config(**LLAMA, tie_word_embeddings=True),
    "qwen3": lambda: transformers.Qwen3Config(**LLAMA, head_dim=8),
    "mixtral": lambda: transformers.MixtralConfig(**LLAMA, num_local_experts=4, num_experts_per_tok=2),
    "gemma3": lambda: transformers.Gemma3TextConfig(**LLAMA, **SLIDING, head_dim=8, tie_word_embeddings=True),
    "gpt2": lambda: transformers.GPT2Config(**GPT2),
    "bert": lambda: transformers.BertConfig(**BERT),
    "t5": lambda: transformers.T5Config(**T5),
    "deepseek2": lambda: transformers.DeepseekV2Config(**MLA),
    "router": lambda: transformers.MixtralConfig(**LLAMA, num_local_experts=4, output_router_logits=True),
}


class CausalLM(LanguageModel):
    """All that a user writes around such a model."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def configure_model(self) -> None:
        self.model = transformers.AutoModelForCausalLM.from_config(CONFIGS[self.name]())

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=tokens, use_cache=False).logits
        return logits


class MaskedLM(CausalLM):
    def configure_model(self) -> None:
        self.model = transformers.AutoModelForMaskedLM.from_config(CONFIGS[self.name]())

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=tokens).logits
        return logits


class Seq2Seq(CausalLM):
    """What comes next in a sequence, knowing it backwards."""

    def configure_model(self) -> None:
        self.model = transformers.AutoModelForSeq2SeqLM.from_config(CONFIGS[self.name]())

    def forward(self, tokens: Tensor) -> Tensor:
        read = tokens.flip(1)
        logits: Tensor = self.model(input_ids=read, decoder_input_ids=tokens, use_cache=False).logits
        return logits


class Conv1D(CausalLM):
    def tensor_parallel_plan(self) -> dict[str, Any]:
        return {"model.transformer.h.*.attn.c_attn": "colwise"}


OTHERS: dict[str, type[CausalLM]] = {"bert": MaskedLM, "t5": Seq2Seq}


def make(name: str) -> CausalLM:
    return OTHERS.get(name, CausalLM)(name)


@pytest.mark.slow
def test_two_ranks() -> None:
    with_a_plan = ("llama", "qwen2", "qwen3", "mixtral", "gemma3")
    cases = [(name, "tp=2") for name in with_a_plan]
    check(
        2, cases + [(name, mesh) for name in (*with_a_plan, "gpt2", *OTHERS) for mesh in ("dp_shard=2", "pp=2")], make
    )


@pytest.mark.slow
def test_four_ranks() -> None:
    """Tied weights, experts that are whole everywhere, norms of each head."""
    split = [("qwen2", "dp_shard=2,tp=2"), ("mixtral", "dp_shard=2,tp=2"), ("gemma3", "pp=2,tp=2")]
    check(4, [*split, ("gpt2", "dp_shard=2,pp=2")], make)


def test_initial_weights_are_those_of_the_config() -> None:
    """Under the meta device transformers leaves its own initialisation out, unless it hears of another one."""
    for name in ("mixtral", "qwen2", "gemma3"):
        task = make(name)
        recipe = record(task.configure_model, task, seed=0)
        for weight in recipe.names:
            value = recipe.make(weight)
            if value.ndim > 1:
                assert value.std().item() == pytest.approx(0.1, rel=0.15), weight
            elif weight.endswith("norm.weight"):
                assert torch.equal(value, torch.full_like(value, 0.0 if name == "gemma3" else 1.0)), weight
            elif weight.endswith("bias"):
                assert not value.any(), weight
    assert recipe.make("model.model.embed_tokens.embed_scale").item() == pytest.approx(32**0.5, rel=1e-3)


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_pretrained_weights(name: str, tmp_path: Path) -> None:
    transformers.AutoModelForCausalLM.from_config(CONFIGS[name]()).save_pretrained(tmp_path)

    class Pretrained(CausalLM):
        def configure_model(self) -> None:
            self.model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)

    task = Pretrained(name)
    recipe, notes = configure(task, task.configure_model, defer=True, seed=0)
    assert recipe is None and "every rank builds the whole model" in notes[0]
    expected = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(task.model.state_dict()[key], value) for key, value in expected.state_dict().items())
    assert torch.equal(task.model.model.rotary_emb.inv_freq, expected.model.rotary_emb.inv_freq)
    assert (task.model.lm_head.weight is task.model.model.embed_tokens.weight) == (name == "qwen2")


EXPORTED = [("qwen2", "pp=2"), ("mixtral", "tp=2"), ("llama", "dp_shard=2")]  # tied over stages; experts; sharded


def _save(rank: int, world_size: int, folder: Path) -> None:
    for name, mesh in EXPORTED:
        config = CheckpointConfig(every_seconds=None)
        Trainer(
            run_dir=str(folder / name),
            callbacks=[EMA(decay=0.5)],
            max_steps=2,
            global_batch_size=8,
            micro_batch_size=4,
            mesh=mesh,
            checkpoint=config,
        ).fit(make(name))


@pytest.mark.slow
def test_an_export_is_a_model_of_the_library(tmp_path: Path) -> None:
    """Of a run in any layout: the same logits, nothing left over, the same names for the sharing of weights."""
    run_ranks(_save, 2, tmp_path, timeout=150)
    tokens = torch.randint(VOCAB, (2, 12))
    for name, _ in EXPORTED:
        reader = CheckpointReader(resolve(str(tmp_path / name)))
        files = export(reader, tmp_path / f"{name}-hf", to="hf", only="model.")
        assert {"config.json", "generation_config.json"} < {file.name for file in files}
        config = json.loads((tmp_path / f"{name}-hf" / "config.json").read_text())
        assert config["dtype"] == "float32" and config["architectures"][0].endswith("ForCausalLM")
        assert not config["architectures"][0].startswith("FSDP")
        task = make(name)
        task.configure_model()
        state = {f"model.{key}": torch.empty_like(value) for key, value in task.state_dict().items()}
        reader.load({key: value for key, value in state.items() if key in reader.tensors})
        task.load_state_dict(
            {key.removeprefix("model."): state[key] for key in reader.tensors if key in state}, strict=False
        )
        loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / f"{name}-hf", output_loading_info=True
        )
        assert type(loaded) is type(task.model)
        assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
        with torch.no_grad():
            assert torch.equal(loaded.eval()(tokens).logits, task.model.eval()(tokens).logits), name
        export(reader, tmp_path / f"{name}-ema", to="hf", only="ema.")
        averages, info = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / f"{name}-ema", output_loading_info=True
        )
        assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
        embedding = {"ema.model.model.embed_tokens.weight": torch.empty(VOCAB, 32)}
        reader.load(embedding)
        assert torch.equal(averages.get_input_embeddings().weight, *embedding.values())


# ---- plans of models ------------------------------------------------------------------------------------------------


def built(name: str, kind: type[CausalLM] = CausalLM) -> CausalLM:
    task = kind(name)
    with torch.device("meta"):
        task.configure_model()
    return task


def test_a_model_brings_its_plan() -> None:
    plan = read_plan(built("qwen3"), 2)
    assert plan.summed == tuple(f"model.model.layers.{i}.self_attn.{n}_norm" for n in "qk" for i in range(2))
    assert {"model.lm_head", "model.model.embed_tokens", "model.model.layers.1.mlp.down_proj"} <= plan.styles.keys()
    mixture = read_plan(built("mixtral"), 2)
    assert not [name for name in (*mixture.styles, *mixture.summed) if "mlp" in name], "experts are whole"

    class SplitLoss(CausalLM):
        def tensor_parallel_plan(self) -> dict[str, Any]:
            return {**(super().tensor_parallel_plan() or {}), "model.lm_head": "colwise_loss_parallel"}

    assert read_plan(built("llama", SplitLoss), 2).splits_loss


@pytest.mark.parametrize(
    ("name", "kind", "tp", "message"),
    [
        ("gpt2", CausalLM, 2, "mesh axis tp=2: CausalLM has no tensor-parallel plan"),
        ("gpt2", Conv1D, 2, "model.transformer.h.0.attn.c_attn is a Conv1D, planned colwise: only nn.Linear and"),
        (
            *("llama", CausalLM, 4),
            r"model.model.layers.0.self_attn.config.num_key_value_heads=2 is not a multiple of tp=4: use 4, or a tp",
        ),
        (
            *("deepseek2", CausalLM, 2),
            r"DeepseekV2ForCausalLM.tp_plan has the style 'mla_kv_a_proj' for model.model.layers.\*.self_attn.kv_a_proj"
            "_with_mqa, which is not supported: define CausalLM.tensor_parallel_plan",
        ),
    ],
)
def test_what_cannot_be_split(name: str, kind: type[CausalLM], tp: int, message: str) -> None:
    with pytest.raises(UsageError, match=message) as raised:
        read_plan(built(name, kind), tp)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("value", [{1}, object()])
def test_a_configuration_that_json_cannot_hold_is_left_out(value: Any) -> None:
    task = nn.Sequential(transformers.LlamaForCausalLM(CONFIGS["llama"]()))
    told = description(task)
    assert told is not None and told["config"]["architectures"] == ["LlamaForCausalLM"]
    task[0].config.extra = value
    assert description(task) is None


class Experts(nn.Module):
    def __init__(self, **told: str) -> None:
        super().__init__()
        self.sinks, self.experts = nn.Parameter(torch.zeros(2)), nn.ModuleDict({"down": nn.Linear(2, 2)})
        self.tp_plan = {"experts": "moe_tp_experts", "experts.down": "rowwise", "gone": "colwise", **told}


def test_what_is_left_of_a_model_s_plan() -> None:
    assert own_plan(nn.Sequential(Experts())) is None, "experts are whole, and nothing else is there"
    assert own_plan(nn.Sequential(Experts(sinks="replicate"))) is None
    assert own_plan(Experts()) is None, "a task's own attributes are its own"
    with pytest.raises(UsageError, match=r"'0.sinks' names a parameter, 0.sinks: only whole modules can be cut"):
        read_plan(nn.Sequential(Experts(sinks="colwise")), 2)


def test_what_a_mesh_cannot_do_is_refused_on_every_rank() -> None:
    said = refusals(2, [("router", "pp=2"), ("gpt2", "tp=2")], make)
    assert said["router", "pp=2"][0].startswith("model.config.output_router_logits: the loss of the routers is of all")
    assert all("CausalLM has no tensor-parallel plan" in text for text in said["gpt2", "tp=2"])
