"""What goes from one pipeline stage to the next outside of a schedule: whole values, and the state of random numbers.

A schedule moves tensors of known shape. Before there is one, and in evaluation, a value travels with its structure, one
stage after another, and what the last stage makes of it comes back to all of them.

In one process the units of a slot draw random numbers one after another from one generator. In a pipeline its state goes
along from stage to stage, so that every unit draws what it would have drawn there.

On failure: an exception in one stage travels on instead of the value, and is raised on every rank of the pipeline.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from elastictrain.errors import UsageError
from elastictrain.parallel.stages import Packed, unpack_value
from elastictrain.parallel.units import Cut


class Message(NamedTuple):
    """What a stage hands on."""

    value: Packed
    units: tuple[Any, ...] = ()  # shapes of what each unit so far has returned
    needs_grad: bool = False  # does a gradient flow back through the value?
    problem: str | None = None


class Line:
    """The stages of one pipeline in a row, as one of its ranks sees them."""

    def __init__(self, cut: Cut, group: dist.ProcessGroup, rank: int, device: torch.device) -> None:
        self.cut, self.group, self.rank, self.device = cut, group, rank, device
        self._sent: list[tuple[Any, Tensor]] = []
        self._kept: dict[int, list[Tensor]] = {}  # random states for a stage that is here as well

    # ---- a value through all stages --------------------------------------------------------------------------------

    def relay(self, advance: Callable[[int, Message], Message]) -> Message:
        """``advance(stage, message)`` on each stage's rank in turn; the last one's message, on every rank.

        Raises:
            UsageError: on every rank but the one where it happened, which raises what did.
        """
        owners, message = self.cut.owners, Message(Packed(None, ()))
        error: Exception | None = None
        for stage, owner in enumerate(owners):
            if owner != self.rank:
                continue
            if stage and owners[stage - 1] != self.rank:
                message = self._receive(owners[stage - 1])
            if message.problem is None:
                try:
                    message = advance(stage, message)
                except Exception as raised:
                    error = raised
                    message = Message(Packed(None, ()), problem=f"pipeline stage {stage}: {raised}")
            if stage + 1 < len(owners) and owners[stage + 1] != self.rank:
                self._send(message, owners[stage + 1])
        message = self._from_last(message)
        if error is not None:
            raise error
        if message.problem is not None:
            raise UsageError(message.problem)
        return message

    def _send(self, message: Message, to: int) -> None:
        head = message._replace(value=Packed(message.value.structure, ()))
        kinds = [(tuple(t.shape), t.dtype) for t in message.value.tensors]
        dist.send_object_list([head, kinds], group=self.group, group_dst=to, device=torch.device("cpu"))
        for tensor in message.value.tensors:
            dist.send(_plain(tensor), group=self.group, group_dst=to)

    def _receive(self, source: int) -> Message:
        box: list[Any] = [None, None]
        dist.recv_object_list(box, group=self.group, group_src=source, device=torch.device("cpu"))
        head, kinds = box
        tensors = [torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype in kinds]
        for tensor in tensors:
            dist.recv(_plain(tensor), group=self.group, group_src=source)
        assert isinstance(head, Message)
        return head._replace(value=Packed(head.value.structure, tuple(tensors)))

    def _from_last(self, message: Message) -> Message:
        source = self.cut.owners[-1]
        head = message._replace(value=Packed(message.value.structure, ()))
        box: list[Any] = [head, [(tuple(t.shape), t.dtype) for t in message.value.tensors]]
        dist.broadcast_object_list(box, group=self.group, group_src=source, device=torch.device("cpu"))
        head, kinds = box
        tensors = message.value.tensors
        if self.rank != source:
            tensors = tuple(torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype in kinds)
        for tensor in tensors:
            dist.broadcast(_plain(tensor), group=self.group, group_src=source)
        assert isinstance(head, Message)
        return head._replace(value=Packed(head.value.structure, tensors))

    # ---- random numbers --------------------------------------------------------------------------------------------

    def send_random(self, stage: int) -> None:
        """The state after ``stage`` has drawn, to the next stage."""
        state, to = random_state(self.device), self.cut.owners[stage + 1]
        if to == self.rank:
            self._kept.setdefault(stage + 1, []).append(state)
        else:
            self._sent.append((dist.isend(state, group=self.group, group_dst=to, tag=stage + 1), state))

    def receive_random(self, stage: int) -> Tensor:
        """The state where ``stage`` begins; microbatches come in their order."""
        source = self.cut.owners[stage - 1]
        if source == self.rank:
            return self._kept[stage].pop(0)
        state = torch.empty_like(random_state(self.device))
        dist.recv(state, group=self.group, group_src=source, tag=stage)
        return state

    def finish(self) -> None:
        """Wait until everything sent has gone."""
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()
        assert not any(self._kept.values()), "a random state that nobody took"


def _plain(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor  # gloo has no bool


def value_of(message: Message) -> Any:
    return unpack_value(message.value.structure, message.value.tensors)


def random_state(device: torch.device) -> Tensor:
    """The state of this process' generators, one uint8 tensor on the CPU."""
    state = torch.get_rng_state()
    return torch.cat([state, torch.cuda.get_rng_state(device)]) if device.type == "cuda" else state


def set_random_state(state: Tensor, device: torch.device) -> None:
    if device.type == "cuda":
        own = torch.cuda.get_rng_state(device).numel()
        torch.cuda.set_rng_state(state[-own:], device)
        state = state[:-own]
    torch.set_rng_state(state)
