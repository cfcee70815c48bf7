from __future__ import annotations

import pytest
import torch

from elastictrain.metrics.devices import by_name, is_part, peak_flops


@pytest.mark.parametrize(
    ("name", "bf16", "fp8"),
    [
        ("NVIDIA H200", 989.4e12, 1978.9e12),
        ("NVIDIA H200 NVL", 835.5e12, 1670.5e12),
        ("NVIDIA H100 80GB HBM3", 989.4e12, 1978.9e12),
        ("NVIDIA H100 PCIe", 756e12, 1513e12),
        ("NVIDIA H100 NVL", 835.5e12, 1670.5e12),
        ("NVIDIA GB200", 2500e12, 5000e12),
        ("NVIDIA B200", 2250e12, 4500e12),
        ("NVIDIA A100-SXM4-80GB", 312e12, None),
        ("NVIDIA A10G", 70e12, None),
        ("NVIDIA A10", 125e12, None),
        ("NVIDIA L4", 121e12, 242.5e12),
        ("NVIDIA L40S", 362.1e12, 733e12),
        ("NVIDIA GeForce RTX 4090", 165.2e12, 330.3e12),
        ("AMD Instinct MI300X", 1307.4e12, 2614.9e12),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None, None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None, None),
        ("NVIDIA GeForce RTX 4090 D", None, None),
        ("NVIDIA GeForce RTX 3090 Ti", None, None),
        ("GRID A100-10C", None, None),
        ("NVIDIA A10-24Q", None, None),
        ("NVIDIA H2000", None, None),
        ("Unheard of", None, None),
    ],
)
def test_the_drivers_name_tells_the_peak(name: str, bf16: float | None, fp8: float | None) -> None:
    assert (by_name(name, "bf16"), by_name(name, "fp16"), by_name(name, "fp8")) == (bf16, bf16, fp8)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> torch.device:
    """A device that calls itself so."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: request.param)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device=None: type("P", (), {"major": 8, "minor": 0})
    )
    return torch.device("cuda", 0)


@pytest.mark.parametrize("device", ["NVIDIA A100-SXM4-80GB"], indirect=True)
def test_fp32_is_measured_by_what_torch_may_use(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "highest")
    assert peak_flops(device, "fp32") == 19.5e12
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    assert peak_flops(device, "fp32") == 156e12
    assert peak_flops(device, "bf16") == 312e12


@pytest.mark.parametrize(
    ("device", "fp16", "fp8"),
    [
        ("Tesla V100-SXM2-32GB", 125e12, None),  # Lightning's table has it
        ("NVIDIA GeForce RTX 3080", None, None),  # and here its figure is not that of tensor cores
        ("NVIDIA Unheard of", None, None),
    ],
    indirect=["device"],
)
def test_what_only_lightning_knows(device: torch.device, fp16: float | None, fp8: float | None) -> None:
    assert peak_flops(device, "fp16") == fp16
    assert peak_flops(device, "fp8") == fp8


def test_a_cpu_has_none() -> None:
    assert peak_flops(torch.device("cpu"), "fp32") is None
    assert not is_part("NVIDIA A100-SXM4-40GB") and is_part("NVIDIA A100-SXM4-40GB MIG 3g.20gb")
