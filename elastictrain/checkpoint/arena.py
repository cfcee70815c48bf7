"""Shared memory that holds one rank's image, byte for byte the file that will be on storage.

It is made once for a layout and filled anew by every save: staging is one copy for each tensor, and needs no memory of
its own. The writer process and the node's keeper map the same memory, so it outlives the worker for as long as they need
it. What it holds is told by the *mark* behind the image (:mod:`elastictrain.checkpoint.marked`): 0 from the moment that it
is filled anew, so that nobody takes a half-filled image for the one that was there before.
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
from elastictrain.checkpoint.marked import make_shared, read_mark, whole_bytes, write_mark

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
        self.descriptor = make_shared(f"elastictrain-{self.number}", image.num_bytes)
        self._map = mmap.mmap(self.descriptor, whole_bytes(image.num_bytes))
        self._map[: len(image.header)] = image.header
        bytes_ = torch.frombuffer(self._map, dtype=torch.uint8, count=image.num_bytes)
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
        self.mark = 0
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
        return memoryview(self._map)[: self.image.num_bytes]

    @property
    def mark(self) -> int:
        return read_mark(memoryview(self._map))

    @mark.setter
    def mark(self, value: int) -> None:
        write_mark(memoryview(self._map), value)

    def close(self) -> None:
        """Give the memory back, once the writer has unmapped it too."""
        if self._pinned is not None:
            torch.cuda.cudart().cudaHostUnregister(self._pinned)
        self._slots = []
        os.close(self.descriptor)
