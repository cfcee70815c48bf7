"""Small Python objects between the ranks of a process group, on the CPU, each in one collective where it is small.

Torch's own ``*_object`` calls tell each other sizes first, so that each costs two collectives or three. On few cores that is
what a small exchange takes: in every collective each rank waits for a turn on a core. Here each object travels in a slot of
:data:`SLOT` bytes, with its length in front; what is longer follows in a second one.

Objects are pickled: whoever is in the group is trusted, as with torch's.

On failure: a peer that is gone makes the collective raise, as any other does.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

SLOT = 2048  # bytes, the length included
_HEAD = 8


def all_gather(value: Any) -> list[Any]:
    """Every rank's value, on every rank; a collective of the default group."""
    slot, rest = _packed(value)
    slots = torch.empty(dist.get_world_size(), SLOT, dtype=torch.uint8)
    dist.all_gather(list(slots), slot)
    lengths = [_length(one) for one in slots]
    if not (longest := max(map(_left, lengths))):
        return [_unpacked(one, length) for one, length in zip(slots, lengths, strict=True)]
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: len(rest)] = rest
    rests = torch.empty(len(slots), longest, dtype=torch.uint8)
    dist.all_gather(list(rests), padded)
    return [_unpacked(*one) for one in zip(slots, lengths, rests, strict=True)]


def gather(value: Any) -> list[Any] | None:
    """Every rank's value on rank 0, None on the others; a collective of the default group."""
    slot, rest = _packed(value)
    if dist.get_rank() > 0:
        dist.gather(slot, None, dst=0)
        if len(rest):
            dist.send(rest, 0)
        return None
    slots = torch.empty(dist.get_world_size(), SLOT, dtype=torch.uint8)
    dist.gather(slot, list(slots), dst=0)
    found = [value]
    for rank in range(1, len(slots)):
        length = _length(slots[rank])
        more = torch.empty(_left(length), dtype=torch.uint8)
        if len(more):
            dist.recv(more, rank)
        found.append(_unpacked(slots[rank], length, more))
    return found


def scatter(values: Sequence[Any] | None) -> Any:
    """This rank's value, of those that rank 0 gives for each; a collective of the default group."""
    slot = torch.empty(SLOT, dtype=torch.uint8)
    if values is None:
        dist.scatter(slot, None, src=0)
        length = _length(slot)
        more = torch.empty(_left(length), dtype=torch.uint8)
        if len(more):
            dist.recv(more, 0)
        return _unpacked(slot, length, more)
    assert len(values) == dist.get_world_size()
    packed = [_packed(value) for value in values]
    dist.scatter(slot, [one for one, _ in packed], src=0)
    for rank, (_, rest) in enumerate(packed):
        if rank > 0 and len(rest):
            dist.send(rest, rank)
    return values[0]


def broadcast(value: Any, *, src: int = 0) -> Any:
    """The value of rank ``src``, on every rank; a collective of the default group."""
    is_mine = dist.get_rank() == src
    slot, rest = _packed(value) if is_mine else (torch.empty(SLOT, dtype=torch.uint8), _NOTHING)
    dist.broadcast(slot, src)
    length = _length(slot)
    if _left(length):
        rest = rest if is_mine else torch.empty(_left(length), dtype=torch.uint8)
        dist.broadcast(rest, src)
    return value if is_mine else _unpacked(slot, length, rest)


_NOTHING = torch.empty(0, dtype=torch.uint8)


def _packed(value: Any) -> tuple[Tensor, Tensor]:
    """A slot, and what has no room in it."""
    data = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    here, rest = bytearray(SLOT), bytearray(data[SLOT - _HEAD :])
    here[:_HEAD] = len(data).to_bytes(_HEAD, "little")
    part = data[: SLOT - _HEAD]
    here[_HEAD : _HEAD + len(part)] = part
    slot = torch.frombuffer(here, dtype=torch.uint8)
    return slot, torch.frombuffer(rest, dtype=torch.uint8) if rest else _NOTHING


def _length(slot: Tensor) -> int:
    return int.from_bytes(slot[:_HEAD].numpy().tobytes(), "little")


def _left(length: int) -> int:
    return max(0, length - (SLOT - _HEAD))


def _unpacked(slot: Tensor, length: int, rest: Tensor = _NOTHING) -> Any:
    here = slot[_HEAD : _HEAD + length].numpy().tobytes()
    return pickle.loads(here + rest[: _left(length)].numpy().tobytes())  # noqa: S301 - see above
