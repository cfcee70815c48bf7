"""Random numbers that belong to a slot: torch's, numpy's and Python's generators of this process, seeded together."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def seed_slot(number: int, device: torch.device | None = None) -> None:
    """Seed all generators that a step or a dataset may draw from; about 9 µs.

    ``torch.manual_seed`` would take some 240 µs: it visits every backend.
    """
    torch.default_generator.manual_seed(number)
    random.seed(number)
    np.random.seed(number & 0xFFFFFFFF)
    if device is not None and device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(number)


@contextmanager
def generators_kept(device: torch.device | None = None) -> Iterator[None]:
    """What is drawn inside does not show outside; with those of ``device``."""
    states = torch.default_generator.get_state(), random.getstate(), np.random.get_state()
    on_device = torch.cuda.get_rng_state(device) if device is not None and device.type == "cuda" else None
    try:
        yield
    finally:
        torch.default_generator.set_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])
        if on_device is not None and device is not None:
            torch.cuda.set_rng_state(on_device, device)
