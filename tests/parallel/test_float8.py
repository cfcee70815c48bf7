"""Products in 8-bit floats: their numerics on the CPU, a training with them, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elastictrain import Trainer, UsageError
from elastictrain.callbacks import ActivationCheckpointing, MixedPrecision
from elastictrain.parallel import float8
from elastictrain.parallel.float8 import Float8Product, float8_modules, rounded, use_float8
from elastictrain.parallel.forwards import Forwards
from tests.helpers import run_ranks
from tests.parallel.llama import Llama, Losses, variant
from tests.parallel.lm import LM

pytestmark = pytest.mark.filterwarnings("ignore")

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@pytest.mark.parametrize(("dtype", "error"), [(E4M3, 2**-4), (E5M2, 2**-3)])
def test_rounding_keeps_the_largest_value_and_half_a_unit_of_the_others(dtype: torch.dtype, error: float) -> None:
    for scale in (1e-7, 1.0, 3e4):
        tensor = torch.randn(64, 64) * scale
        small, back = rounded(tensor, dtype)
        assert small.dtype == dtype and back.dtype == torch.float32 and back.ndim == 0
        again = small.float() * back
        assert again.abs().max() == pytest.approx(tensor.abs().max().item(), rel=1e-6)
        large = tensor.abs() > 0.05 * tensor.abs().max()
        assert ((again - tensor).abs() / tensor.abs())[large].max() <= error
    small, back = rounded(torch.zeros(16, 16), dtype)
    assert torch.equal(small.float() * back, torch.zeros(16, 16))
    assert (rounded(torch.full((16,), 1e-20), dtype)[0].float() * back).isfinite().all()


def _emulated(x: Tensor, weight: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same by numbers that are rounded and multiplied in fp64."""
    x8, w8, g8 = (
        small.double() * scale for small, scale in (rounded(x, E4M3), rounded(weight, E4M3), rounded(gradient, E5M2))
    )
    return x8 @ w8.T, g8 @ w8, g8.T @ x8


@pytest.mark.parametrize("rows", [32, 21])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_three_products_are_those_of_rounded_numbers(rows: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(rows, 48, dtype=dtype).requires_grad_()
    weight = (0.02 * torch.randn(64, 48, dtype=dtype)).requires_grad_()
    gradient = (1e-5 * torch.randn(rows, 64)).to(torch.bfloat16)
    y: Any = Float8Product.apply(x, weight)
    y.backward(gradient)
    assert (y.dtype, x.grad.dtype, weight.grad.dtype) == (torch.bfloat16, dtype, dtype)
    for found, expected in zip((y, x.grad, weight.grad), _emulated(x, weight, gradient), strict=True):
        difference = (found.double() - expected).abs().max() / expected.abs().max()
        assert difference <= (1e-6 if found.dtype == torch.float32 else 4e-3)
    exact = x.detach().double() @ weight.detach().double().T
    assert 1e-4 < (y.double() - exact).norm() / exact.norm() < 0.06, "it is rounded, and not much"


def test_layers_within_blocks_and_back() -> None:
    task = LM()
    names = float8_modules(task, ["blocks.0", "blocks.2"])
    assert names == [f"blocks.{i}.{part}" for i in (0, 2) for part in ("qkv", "out", "up", "down")]
    forwards = Forwards()
    use_float8(task, names, forwards)
    x = torch.randn(2, 3, 32)
    layer = task.blocks[0].up
    assert layer(x).dtype == torch.bfloat16 and layer(x).shape == (2, 3, 128)
    torch.testing.assert_close(layer(x).float(), nn.functional.linear(x, layer.weight, layer.bias), atol=0.1, rtol=0.1)
    nothing = layer(torch.zeros(0, 32))
    nothing.float().sum().backward()
    assert nothing.shape == (0, 128) and nothing.dtype == torch.bfloat16 and not layer.weight.grad.any()
    forwards.restore()
    assert layer(x).dtype == torch.float32
    with pytest.raises(UsageError, match='MixedPrecision."fp8".: Sequential has no block with an nn.Linear'):
        float8_modules(nn.Sequential(nn.Linear(8, 8)), ["0"])


def _train(rank: int, world_size: int) -> Any:
    float8.missing_for_float8.__code__ = (lambda: None).__code__  # the CPU multiplies them too, slowly
    found: dict[Any, Any] = {}
    for mesh, compute, callbacks in (
        ("dp_shard=2", "bf16", []),
        ("dp_shard=2", "fp8", [ActivationCheckpointing()]),
        ("dp_shard=2", "fp8", [ActivationCheckpointing("selective")]),
        ("pp=2", "fp8", []),
        ("dp_replicate=2", "fp8", []),
    ):
        losses, task = Losses(), Llama(variant(optimizer="adamw", plan="plain"))
        Trainer(
            max_steps=6,
            mesh=mesh,
            global_batch_size=8,
            micro_batch_size=2,
            log_every=1,
            callbacks=[losses, MixedPrecision(compute), *callbacks],
        ).fit(task)
        assert all(parameter.dtype == torch.float32 for parameter in task.parameters())
        found[mesh, compute, len(found)] = losses.values
    with pytest.raises(UsageError, match='mesh axis tp=2 with MixedPrecision."fp8".'):
        Trainer(max_steps=1, mesh="tp=2", callbacks=[MixedPrecision("fp8")]).fit(Llama())
    with pytest.raises(UsageError, match='MixedPrecision."fp8". with pp_schedule ZBV'):
        Trainer(max_steps=1, mesh="pp=2,pp_schedule=ZBV", callbacks=[MixedPrecision("fp8")]).fit(Llama())
    return found


@pytest.mark.slow
def test_a_training_follows_that_in_bf16() -> None:
    for found in run_ranks(_train, 2, timeout=120):
        reference, *others = found.values()
        assert reference[6] < reference[1]
        for losses in others:
            assert losses == pytest.approx(reference, rel=0.02)
            assert losses != reference, "something is rounded"


def test_without_such_a_gpu_it_says_so_before_anything_starts() -> None:
    if float8.missing_for_float8() is None:
        pytest.skip("this machine has such a GPU")
    with pytest.raises(
        UsageError, match=r'^MixedPrecision\("fp8"\): fp8 needs a GPU of compute capability 8.9 .*"bf16"$'
    ):
        Trainer(max_steps=1, global_batch_size=2, callbacks=[MixedPrecision("fp8")]).fit(LM())
