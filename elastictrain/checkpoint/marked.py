"""Shared memory of an image and a mark: a number behind the image that says what it holds now, 0 for nothing whole.

Whoever fills the memory writes 0 first and the mark last. Whoever reads it looks at the mark before and after: the same
number, not 0, says that nothing has changed in between. The mark is one aligned word, so it is written at once. Imports no
torch.

On failure: memory that is smaller than it should be is an ``OSError`` from :class:`Marked`; it cannot shrink later.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import weakref

_MARK_BYTES = 8


def whole_bytes(num_bytes: int) -> int:
    """Of the image, up to the next full word, and the mark."""
    return -(-num_bytes // _MARK_BYTES) * _MARK_BYTES + _MARK_BYTES


def make_shared(name: str, num_bytes: int) -> int:
    """A descriptor of new memory for an image of so many bytes, whose size never changes."""
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, whole_bytes(num_bytes))
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return descriptor


def read_mark(whole: memoryview) -> int:
    return int(whole[-_MARK_BYTES:].cast("Q")[0])


def write_mark(whole: memoryview, mark: int) -> None:
    whole[-_MARK_BYTES:].cast("Q")[0] = mark


class Marked:
    """Memory that another process has made, or that is made here.

    Args:
        descriptor: of it; it belongs to this object from now on, and is closed with it.
        num_bytes: of the image.

    Attributes:
        view: the image.
    """

    def __init__(self, descriptor: int, num_bytes: int, *, writable: bool = False) -> None:
        self.descriptor, self.num_bytes = descriptor, num_bytes
        weakref.finalize(self, os.close, descriptor)
        if os.fstat(descriptor).st_size != whole_bytes(num_bytes):
            raise OSError(errno.EINVAL, f"shared memory has not the size of an image of {num_bytes} bytes")
        if not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise OSError(errno.EINVAL, "shared memory that could shrink")
        access = mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ
        self._whole = memoryview(mmap.mmap(descriptor, whole_bytes(num_bytes), mmap.MAP_SHARED, access))
        self.view = self._whole[:num_bytes]

    @property
    def mark(self) -> int:
        return read_mark(self._whole)

    @mark.setter
    def mark(self, value: int) -> None:
        write_mark(self._whole, value)
