"""Process groups of gloo in which nobody waits for ever, whatever gloo loses when its connections are cut.

Of the operations that are going on when a connection ends, gloo forgets two kinds (``Pair::signalException`` of
pytorch/gloo, as it is in torch 2.13): one whose message has come in part, and one whose message has not gone out whole.
Nobody who waits for them is told, and waits for the group's timeout, half an hour. The larger messages are, the more often
that is so. Here the wait itself looks, every :data:`TICK`, whether the groups have been severed. The one wait of gloo's that
heeds no limit is that of ``reduce_scatter``, which torch makes of an allreduce; so it is made of one here.

While a group is made, of two ranks one connects, and the other waits for it, for as long, without a connection that could be
cut. So gloo's group is made in a thread, and the wait for that looks as well.

On failure: ``RuntimeError`` that names gloo, as its own do. A group in which such an operation is left is never destroyed,
since that waits for it: a few threads stay until this process ends, and its tensors until the group's timeout. So long
stays the thread that makes a group, if one of its ranks is gone.
"""

from __future__ import annotations

import ctypes
import queue
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from elastictrain.compat.torch import REDUCE_SCATTERS, gloo_operations

TICK = timedelta(milliseconds=50)
ENDS = 0.1  # seconds in which an operation of a severed group ends, if gloo has not forgotten it
MANY = 64  # operations that somebody has begun and not waited for, before they are looked through

Work = dist.Work


class SeverableGroup(dist.ProcessGroup):
    """On CPUs.

    Args:
        is_severed: whether its connections have been cut on purpose; called while somebody waits.
    """

    def __init__(
        self, store: dist.Store, rank: int, world_size: int, timeout: timedelta, *, is_severed: Callable[[], bool]
    ) -> None:
        super().__init__(rank, world_size)  # type: ignore[call-arg]
        self._make: Callable[[], Any] = lambda: dist.ProcessGroupGloo(store, rank, world_size, timeout=timeout)
        self.is_severed = is_severed
        # A mesh has a group for each axis, and hardly anybody asks one of a single rank for anything.
        self._gloo: Any = self._meet() if world_size > 1 else None
        self.open: set[Work] = set()  # collectives that nobody has waited for to the end
        self._messages: _Messages | None = None
        self._group_name = self._description = ""

    @property
    def gloo(self) -> Any:
        if self._gloo is None:
            self._gloo = self._make()
        return self._gloo

    def _meet(self) -> Any:
        """Gloo's group, once its ranks are connected."""
        answer: queue.SimpleQueue[tuple[Any, Exception | None]] = queue.SimpleQueue()

        def make() -> None:
            try:
                answer.put((self._make(), None))
            except Exception as error:
                answer.put((None, error))

        threading.Thread(target=make, name="gloo begin", daemon=True).start()
        made, error = _answered(answer, self)
        if error is not None:
            raise error
        return made

    def close(self) -> None:
        """Nobody uses it any more."""
        if not all(work.is_completed() for work in self.open):  # the next generation does not wait for these
            threading.Thread(target=self._outlive, args=(self.open,), name="gloo end", daemon=True).start()
        self.open = set()
        if self._messages is not None:
            self._messages.close()

    def _outlive(self, works: set[Work]) -> None:
        """Operations end soon, or never; then this is never destroyed."""
        deadline = time.monotonic() + ENDS
        while not all(work.is_completed() for work in works):
            if time.monotonic() > deadline:
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._gloo))
                return
            time.sleep(0.005)

    def collective(self, work: Work) -> Work:
        if len(self.open) > MANY:
            self.open = {one for one in self.open if not one.is_completed()}
        self.open.add(work)
        return _Collective(work, self)

    def message(self, work: Work) -> Work:
        if self._messages is None:
            self._messages = _Messages()
        return _Message(work, self, self._messages)

    # functional collectives ask for all of a list at once; the names are those that every torch has
    def allgather_into_tensor_coalesced(self, output_lists: list[Any], input_list: list[Any], opts: Any = None) -> Work:
        return _All([self.all_gather_single(*pair) for pair in zip(output_lists, input_list, strict=True)])

    def scatter_one(self, output: Any, input: Any, opts: Any = None) -> Work:
        return self._scattered(output, input.detach().clone(memory_format=torch.contiguous_format), opts)

    def scatter_lists(self, outputs: list[Any], inputs: list[list[Any]], opts: Any = None) -> Work:
        return _All(
            [
                self._scattered(one, torch.stack(parts).detach(), opts)
                for one, parts in zip(outputs, inputs, strict=True)
            ]
        )

    def _scattered(self, output: Any, whole: Any, opts: Any) -> Work:
        """``whole`` is summed in place, and this rank's part of it copied."""
        if whole.numel() != self.size() * output.numel():
            raise ValueError(f"{self.size()} ranks cannot share {tuple(whole.shape)} as {tuple(output.shape)} each")
        reduce = dist.AllreduceOptions()
        if opts is not None:
            reduce.reduceOp = opts.reduceOp
        part = whole.view(self.size(), -1)[self.rank()].view(output.shape)
        return _Scattered(self.collective(self.gloo.allreduce([whole], reduce)), output, part)

    def reduce_scatter_tensor_coalesced(
        self, outputTensors: list[Any], inputTensors: list[Any], opts: Any = None
    ) -> Work:
        return _All([self.scatter_one(*pair, opts) for pair in zip(outputTensors, inputTensors, strict=True)])

    # what torch's own group asks its backend for
    def getBackendName(self) -> str:
        return "gloo"

    def setGroupName(self, name: str) -> None:
        self._group_name = name

    def getGroupName(self) -> str:
        return self._group_name

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    def getGroupDesc(self) -> str:
        return self._description

    def abort(self) -> None:
        """:meth:`close` does what there is to do."""

    shutdown = abort


def _forwarded(name: str, *, is_message: bool) -> Callable[..., Work]:
    def operation(self: SeverableGroup, *args: Any, **kwargs: Any) -> Work:
        work = getattr(self.gloo, name)(*args, **kwargs)
        return self.message(work) if is_message else self.collective(work)

    return operation


for _ours, _gloos in gloo_operations().items():
    setattr(SeverableGroup, _ours, _forwarded(_gloos, is_message=_ours in ("send", "recv", "recv_anysource")))
for _ours in REDUCE_SCATTERS:
    setattr(SeverableGroup, _ours, SeverableGroup.scatter_one)
setattr(SeverableGroup, "reduce_scatter", SeverableGroup.scatter_lists)  # noqa: B010 - torch's stub has other overloads


class _Collective(Work):
    def __init__(self, work: Work, group: SeverableGroup) -> None:
        super().__init__()
        self._work, self._group = work, group

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:  # zero is no limit, as torch has it
        began = time.monotonic()
        while True:
            try:
                done = self._work.wait(TICK)
            except RuntimeError:
                if not self._work.is_completed():  # TICK is over
                    _check(self._group, timeout, began)
                    continue
                self._group.open.discard(self._work)
                return bool(self._work.wait())  # it says itself what is wrong
            self._group.open.discard(self._work)
            return bool(done)

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def is_success(self) -> bool:
        return self._work.is_success()

    def exception(self) -> Any:
        return self._work.exception()

    def result(self) -> Any:
        return self._work.result()

    def get_future(self) -> Any:
        return self._work.get_future()


class _Scattered(Work):
    def __init__(self, work: Work, output: Any, part: Any) -> None:
        super().__init__()
        self._work, self._output, self._part = work, output, part
        self._is_over = False

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if not self._is_over:
            self._work.wait(timeout)
            with torch.no_grad():
                self._output.copy_(self._part)
            self._is_over, self._output, self._part = True, None, None
        return True

    def is_completed(self) -> bool:
        return self._is_over


class _Messages:
    """Waits for messages in a thread of its own: a wait with a timeout would make gloo close all connections after it."""

    def __init__(self) -> None:
        self._asked: queue.SimpleQueue[tuple[Work, queue.SimpleQueue[Any]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="gloo messages", daemon=True).start()

    def ask(self, work: Work) -> queue.SimpleQueue[Any]:
        """Where the error will be, or None."""
        answer: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._asked.put((work, answer))
        return answer

    def close(self) -> None:
        self._asked.put(None)

    def _run(self) -> None:
        while (asked := self._asked.get()) is not None:
            work, answer = asked
            try:
                work.wait()
            except Exception as error:
                answer.put(error)
            else:
                answer.put(None)
            del asked, work, answer  # the next one may be long in coming


class _Message(Work):
    def __init__(self, work: Work, group: SeverableGroup, messages: _Messages) -> None:
        super().__init__()
        self._work, self._group, self._messages = work, group, messages
        self._is_over = False

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if self._is_over:
            return True
        error = _answered(self._messages.ask(self._work), self._group, timeout)
        if error is not None:
            raise error
        self._is_over = True
        return True

    def is_completed(self) -> bool:
        return self._is_over or self._work.is_completed()


class _All(Work):
    def __init__(self, works: Sequence[Work]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        for work in self._works:
            work.wait(timeout)
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


def _answered(answer: queue.SimpleQueue[Any], group: SeverableGroup, timeout: timedelta = timedelta(0)) -> Any:
    """What another thread, which gloo may keep waiting for ever, has to say.

    Raises:
        RuntimeError: there is nothing to wait for any more.
    """
    began = time.monotonic()
    while True:
        try:
            return answer.get(timeout=TICK.total_seconds())
        except queue.Empty:
            _check(group, timeout, began)


def _check(group: SeverableGroup, timeout: timedelta, began: float) -> None:
    """
    Raises:
        RuntimeError: there is nothing to wait for any more.
    """
    if group.is_severed():
        raise RuntimeError("gloo: the connections of this group were cut, and an operation of it has not ended")
    if timedelta(0) < timeout < timedelta(seconds=time.monotonic() - began):
        raise RuntimeError(f"gloo: an operation has not ended within {timeout.total_seconds():g} s")
