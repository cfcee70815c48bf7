"""What devices can compute at most: dense FLOP/s by name and precision, for MFU.

The table has the makers' own figures without sparsity. A row fits where all of its words are in the driver's name of the
device, the most special row first. What is not in the table is looked up in Lightning's, and not believed where its half
precision is clearly not that of tensor cores. Parts of a GPU (MIG, vGPU), laptop chips and other cut-down versions are
unknown, and so is everything else: no MFU is better than a wrong one.

Nothing here can fail.
"""

from __future__ import annotations

import re
import warnings

import torch
from lightning.fabric.utilities.throughput import get_available_flops

Row = tuple[str, float | None, float | None, float | None, float | None]

# TFLOP/s, dense: where a data sheet gives figures with sparsity, half of them. None: no such units, or not published.
_TABLE: tuple[Row, ...] = (
    # name, fp32 (no tensor cores), tf32, bf16 and fp16 (adding up in fp32), fp8; the source
    ("GB200", 80.0, 1250.0, 2500.0, 5000.0),  # NVIDIA GB200 NVL72 data sheet, a 72nd
    ("B200", 75.0, 1100.0, 2250.0, 4500.0),  # NVIDIA HGX B200 data sheet, an eighth
    ("GH200", 67.0, 494.7, 989.4, 1978.9),  # NVIDIA GH200 data sheet
    ("H200 NVL", 60.0, 417.5, 835.5, 1670.5),  # NVIDIA H200 data sheet
    ("H200", 67.0, 494.7, 989.4, 1978.9),  # NVIDIA H200 data sheet, SXM
    ("H100 NVL", 60.0, 417.5, 835.5, 1670.5),  # NVIDIA H100 data sheet
    ("H100 PCIe", 51.2, 378.0, 756.0, 1513.0),  # NVIDIA H100 PCIe product brief
    ("H100 HBM2e", 51.2, 378.0, 756.0, 1513.0),  # another name of it
    ("H100", 66.9, 494.7, 989.4, 1978.9),  # NVIDIA H100 architecture white paper, SXM5
    ("H800 PCIe", 51.2, 378.0, 756.0, 1513.0),  # an H100 PCIe with slower links
    ("H800", 66.9, 494.7, 989.4, 1978.9),  # an H100 SXM5 with slower links
    ("H20", 44.0, 74.0, 148.0, 296.0),  # NVIDIA HGX H20 data sheet
    ("A100", 19.5, 156.0, 312.0, None),  # NVIDIA A100 data sheet
    ("A800", 19.5, 156.0, 312.0, None),  # an A100 with slower links
    ("A40", 37.4, 74.8, 149.7, None),  # NVIDIA A40 data sheet
    ("A30", 10.3, 82.0, 165.0, None),  # NVIDIA A30 data sheet
    ("A10G", None, 35.0, 70.0, None),  # NVIDIA A10G data sheet
    ("A10", 31.2, 62.5, 125.0, None),  # NVIDIA A10 data sheet
    ("L40S", 91.6, 183.0, 362.1, 733.0),  # NVIDIA L40S data sheet
    ("L40", 90.5, 90.5, 181.1, 362.0),  # NVIDIA L40 data sheet
    ("L4", 30.3, 60.0, 121.0, 242.5),  # NVIDIA L4 data sheet
    ("RTX 6000 Ada", 91.1, 182.1, 364.2, 728.5),  # NVIDIA RTX 6000 Ada data sheet
    ("RTX A6000", 38.7, 77.4, 154.8, None),  # NVIDIA RTX A6000 data sheet
    ("RTX 5090", 104.8, 104.8, 209.5, 419.0),  # NVIDIA RTX Blackwell architecture white paper
    ("RTX 4090", 82.6, 82.6, 165.2, 330.3),  # NVIDIA Ada architecture white paper, appendix A
    ("RTX 3090", 35.6, 35.6, 71.0, None),  # NVIDIA GA102 architecture white paper, appendix A
    ("MI325X", 163.4, 653.7, 1307.4, 2614.9),  # AMD Instinct MI325X data sheet
    ("MI300X", 163.4, 653.7, 1307.4, 2614.9),  # AMD Instinct MI300X data sheet
    ("MI250X", None, None, 191.5, None),  # AMD Instinct MI250X data sheet: a die, which torch calls a device
)
_COLUMNS = {"fp32": 1, "tf32": 2, "bf16": 3, "fp16": 3, "fp8": 4}
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_CUT_DOWN = frozenset({"mig", "grid", "laptop", "mobile", "max", "ti", "super", "d"})
_TENSOR_CORES = 4.0  # half precision is at least so many times faster with them than fp32 without


def peak_flops(device: torch.device, precision: str) -> float | None:
    """FLOP/s that a device reaches at most; None where that is not known.

    Args:
        precision: "fp32", "bf16", "fp16" or "fp8"; where torch may use tf32 for fp32, tf32 is the measure.
    """
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name(device)
    if is_part(name):
        return None
    if _row(name) is not None:
        return by_name(name, "tf32" if precision == "fp32" and _uses_tf32() else precision)
    if precision not in _DTYPES:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns where it has no answer
        found, single = (get_available_flops(device, dtype) for dtype in (_DTYPES[precision], torch.float32))
    if found is None or (precision != "fp32" and (single is None or found < _TENSOR_CORES * single)):
        return None
    return float(found)


def by_name(name: str, precision: str) -> float | None:
    """FLOP/s by our own table, from the driver's name of the device; None where that does not say."""
    row = None if is_part(name) else _row(name)
    tera = None if row is None else row[_COLUMNS[precision]]
    return None if tera is None else float(tera) * 1e12


def is_part(name: str) -> bool:
    """Is it a part or a cut-down version of what its name has in it?"""
    words = _words(name)
    return not _CUT_DOWN.isdisjoint(words) or any(re.fullmatch(r"\d+[abcq]", word) for word in words)  # A10-24Q: vGPU


def _row(name: str) -> Row | None:
    words = _words(name)
    return next((row for row in _TABLE if words.issuperset(_words(row[0]))), None)


def _words(name: str) -> set[str]:
    return set(re.split(r"[^a-z0-9]+", name.lower()))


def _uses_tf32() -> bool:
    return torch.get_float32_matmul_precision() != "highest"
