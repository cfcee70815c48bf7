"""Shared memory that holds one rank's image, byte for byte the file that will be on storage.

It is made once for a layout and filled anew by every save: staging is one copy for each tensor, and needs no memory of
its own. The writer process maps the same memory, so it outlives the worker for as long as the writer needs it.
"""

from __future__ import annotations

import itertools
import math
import mmap
import os
from collections.abc import Callable

import torch
from torch import Tensor

from elastictrain.checkpoint.image import DTYPES, Image, local

_numbers = itertools.count(1)


class Arena:
    """Memory for one :class:`~elastictrain.checkpoint.image.Image`.

    Args:
        pin: register the memory with CUDA, so that copies from a GPU run at the bus's full speed.

    Attributes:
        number: tells arenas of one process apart.
        descriptor: of the shared memory.
    """

    def __init__(self, image: Image, *, pin: bool) -> None:
        self.image = image
        self.number = next(_numbers)
        self.descriptor = os.memfd_create(f"elastictrain-{self.number}", os.MFD_CLOEXEC)
        os.ftruncate(self.descriptor, image.num_bytes)
        self._map = mmap.mmap(self.descriptor, image.num_bytes)
        self._map[: len(image.header)] = image.header
        bytes_ = torch.frombuffer(self._map, dtype=torch.uint8)
        self._pinned = bytes_.data_ptr() if pin else None
        if self._pinned is not None:
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(self._pinned, image.num_bytes, 0))
        self._slots = [
            (one, bytes_[one.start : one.end].view(DTYPES[one.dtype]).view(one.lengths))
            for one in image.pieces
            if math.prod(one.lengths)
        ]

    def stage(self, resolve: Callable[[str], Tensor]) -> None:
        """Fill the image; ``resolve(name)`` is the local tensor of a piece. Returns when all bytes are there."""
        devices = set[torch.device]()
        with torch.no_grad():
            for one, slot in self._slots:
                tensor = local(one, resolve)
                slot.copy_(tensor, non_blocking=True)
                if tensor.is_cuda:
                    devices.add(tensor.device)
        for device in devices:
            torch.cuda.synchronize(device)

    @property
    def view(self) -> memoryview:
        return memoryview(self._map)

    def close(self) -> None:
        """Give the memory back, once the writer has unmapped it too."""
        if self._pinned is not None:
            torch.cuda.cudart().cudaHostUnregister(self._pinned)
        self._slots = []
        os.close(self.descriptor)
