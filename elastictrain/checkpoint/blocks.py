"""Content hashes of a file, block by block, so that any byte range can be checked without reading the rest.

A block is the smallest power of two from 32 KiB up that gives a file no more than :data:`MAX_BLOCKS`: small blocks so
that a rank that needs a part of a tensor reads little beside it, few so that the list stays a small part of a manifest.
The hash is XXH3 (64 bits): it runs at the speed of memory, and finds damage. It is no defence against somebody who can
write to the storage; neither is any hash that lies beside the data. Imports no torch.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass

import xxhash

HASH = "xxh3-64"
MIN_BLOCK_BYTES = 32 << 10
MAX_BLOCK_BYTES = 1 << 30
MAX_BLOCKS = 32768
DIGEST_BYTES = 8


def block_bytes_of(num_bytes: int) -> int:
    """The block size of a file of so many bytes."""
    size = MIN_BLOCK_BYTES
    while size * MAX_BLOCKS < num_bytes and size < MAX_BLOCK_BYTES:
        size *= 2
    return size


@dataclass(frozen=True)
class Blocks:
    """The hashes of one file, the last block shorter than the others."""

    num_bytes: int
    block_bytes: int
    digests: bytes  # one after the other

    def __post_init__(self) -> None:
        assert len(self.digests) == DIGEST_BYTES * -(-self.num_bytes // self.block_bytes), len(self.digests)

    @classmethod
    def of(cls, data: bytes | bytearray | memoryview) -> Blocks:
        """Of a whole file in memory."""
        hasher = Hasher(len(data))
        hasher.update(memoryview(data))
        return hasher.finish()

    @property
    def text(self) -> str:
        return base64.b64encode(self.digests).decode()

    @classmethod
    def parse(cls, num_bytes: int, block_bytes: int, text: object) -> Blocks | None:
        """What :attr:`text` was written from; None where it cannot be of such a file."""
        if not isinstance(text, str) or not MIN_BLOCK_BYTES <= block_bytes <= MAX_BLOCK_BYTES:
            return None
        try:
            digests = base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError):
            return None
        if len(digests) != DIGEST_BYTES * -(-num_bytes // block_bytes):
            return None
        return cls(num_bytes, block_bytes, digests)

    def around(self, start: int, end: int) -> tuple[int, int]:
        """The smallest range of whole blocks that covers ``start`` to ``end``."""
        size = self.block_bytes
        return start // size * size, min(-(-end // size) * size, self.num_bytes)

    def damage(self, start: int, data: memoryview) -> tuple[int, int] | None:
        """The first range of ``data`` (the file's bytes from the block boundary ``start`` on) that is not as hashed."""
        assert start % self.block_bytes == 0 and start + len(data) <= self.num_bytes
        assert len(data) % self.block_bytes == 0 or start + len(data) == self.num_bytes
        index = start // self.block_bytes * DIGEST_BYTES
        for place in range(0, len(data), self.block_bytes):
            block = data[place : place + self.block_bytes]
            if xxhash.xxh3_64_digest(block) != self.digests[index : index + DIGEST_BYTES]:
                return start + place, start + place + len(block)
            index += DIGEST_BYTES
        return None


class Hasher:
    """Hashes a file that comes in parts of any size."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._block_bytes = block_bytes_of(num_bytes)
        self._digests = bytearray()
        self._open = xxhash.xxh3_64()
        self._filled = 0  # bytes in the open block

    def update(self, part: memoryview) -> None:
        place = 0
        while place < len(part):
            took = min(len(part) - place, self._block_bytes - self._filled)
            if took == self._block_bytes:
                self._digests += xxhash.xxh3_64_digest(part[place : place + took])
            else:
                self._open.update(part[place : place + took])
                self._filled += took
                if self._filled == self._block_bytes:
                    self._close()
            place += took

    def finish(self) -> Blocks:
        """All parts were given."""
        if self._filled:
            self._close()
        return Blocks(self._num_bytes, self._block_bytes, bytes(self._digests))

    def _close(self) -> None:
        self._digests += self._open.digest()
        self._open.reset()
        self._filled = 0
