"""An agent's words to a worker that may outlive its generation: lines of JSON through a pipe.

The agent says two things: *generation N is over*, and *this is your place in generation N*. A worker without a place is a
spare. A worker takes the newest place; those in between are passed over. The worker reads in a thread that sleeps until
something is said, so that what must be done at once (see :meth:`Line.when_over`) does not wait for what the worker is doing.

On failure: an agent that is gone says nothing more; its workers are killed by the kernel. A worker that does not read, or
has ended, is no trouble for the agent: what is said to it is dropped.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

log = logging.getLogger(__name__)

LINE = "ELASTICTRAIN_LINE"  # "DESCRIPTOR:PID OF THE AGENT"
WARM = "ELASTICTRAIN_WARM"  # names a file that a spare makes when it has imported everything
PAUSE = 0.5  # seconds between two looks whether a signal has come, on systems where it does not end a wait


@dataclass(frozen=True)
class Place:
    """A worker's place in one generation.

    Args:
        generation: its number.
        assignment: path of the file with what all workers of the node are told.
        environment: what torchrun would say of this worker.
    """

    generation: int
    assignment: str
    environment: Mapping[str, str]


@dataclass(frozen=True)
class Assignment:
    """What an agent tells all workers of one generation on its node; the rank is in the environment.

    Args:
        agent_pid: the agent; a worker does not outlive it.
        generation: 0 first.
        cells: path of the shared cells.
        reports: directory in which a worker leaves the report of its end.
        target: what ``run.json`` records.
        settings: the ``--set`` values.
        node: this node's ``--local-addr``; None: it was given none.
        job: whatever the worker command needs besides; JSON.
        job_id: the same for all workers of all generations on all nodes of this run, and for no others.
        history: seconds since the epoch at which the agent ``started``, and the rendezvous of this generation ``began``
            and was ``formed``; from the second generation on also when the one before ``ended``, the number of steps
            that it had ``reached``, -1 for none, and of ``nodes`` that took part in it; ``planned`` is there where its nodes
            had agreed on its end; ``stood_by`` is there where this node stood by, or all did: since when.
        cause: why that one ended, in words.
        lost: host and pid of agents that were in that generation, and are not in this one though nobody had planned it.
        publishes: workers leave the newest values beside this file, for whoever asks the agent.
    """

    agent_pid: int
    generation: int
    cells: str
    reports: str
    job_id: str = ""
    target: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    node: str | None = None
    job: dict[str, Any] = field(default_factory=dict)
    history: dict[str, float] = field(default_factory=dict)
    cause: str = ""
    lost: Sequence[tuple[str, int]] = ()
    publishes: bool = False

    def write(self, path: str) -> None:
        with open(path, "x", encoding="utf-8") as file:
            json.dump(asdict(self), file)

    @classmethod
    def read(cls, path: str) -> Assignment:
        with open(path, encoding="utf-8") as file:
            return cls(**json.load(file))


class Speaker:
    """The agent's end.

    Attributes:
        descriptor: the other end, for the worker to inherit; :meth:`handed_on` closes it here.
    """

    def __init__(self) -> None:
        self.descriptor, self._out = os.pipe()
        os.set_blocking(self._out, False)

    @property
    def environment(self) -> dict[str, str]:
        """Tells the worker where to listen."""
        return {LINE: f"{self.descriptor}:{os.getpid()}"}

    def handed_on(self) -> None:
        os.close(self.descriptor)

    def place(self, place: Place) -> None:
        self._say({"place": asdict(place)})

    def over(self, generation: int) -> None:
        self._say({"over": generation})

    def close(self) -> None:
        os.close(self._out)

    def _say(self, message: dict[str, Any]) -> None:
        try:
            os.write(self._out, json.dumps(message).encode() + b"\n")  # shorter than PIPE_BUF: whole or not at all
        except OSError as error:  # it has ended, or has been stopped for very long
            log.debug("a worker was not told %s: %s", list(message), error)


class Line:
    """The worker's end.

    Args:
        descriptor: of the pipe.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._changed = threading.Condition()
        self._place: Place | None = None  # said, and not yet taken
        self._over = -1
        self._act: Callable[[], None] | None = None
        self._acts_on = 0  # the generation that it belongs to
        threading.Thread(target=self._listen, name="line", daemon=True).start()

    @classmethod
    def of_this_process(cls) -> Line | None:
        """None: no agent has started this very process."""
        descriptor, _, agent = os.environ.get(LINE, "").partition(":")
        return cls(int(descriptor)) if agent == str(os.getppid()) else None

    def is_over(self, generation: int) -> bool:
        """Costs no more than a comparison."""
        return self._over >= generation

    def when_over(self, act: Callable[[], None] | None, *, generation: int = 0) -> None:
        """What the listening thread does as soon as that generation is over; None: nothing.

        It may do so late, when the worker is in the next one already.
        """
        with self._changed:
            self._act, self._acts_on = act, generation

    def wait_until_over(self, generation: int, *, seconds: float) -> bool:
        """Whether it was over by then."""
        return self._wait(lambda: self.is_over(generation), seconds)

    def take(self, *, seconds: float | None = None) -> Place | None:
        """The newest place, whose generation may be over already; waits for one. None: there was none by then.

        A signal's handler runs meanwhile, and may raise.
        """
        self._wait(lambda: self._place is not None, seconds)
        with self._changed:
            place, self._place = self._place, None
        return place

    def _wait(self, condition: Callable[[], bool], seconds: float | None) -> bool:
        deadline = None if seconds is None else time.monotonic() + seconds
        with self._changed:
            while not condition():
                left = PAUSE if deadline is None else min(PAUSE, deadline - time.monotonic())
                if left <= 0:
                    return False
                self._changed.wait(left)
        return True

    def _listen(self) -> None:
        with open(self._descriptor, encoding="utf-8") as lines:
            for line in lines:
                message = json.loads(line)
                is_news = message.get("over", -1) > self._over  # it may be said twice, and another one has begun since
                with self._changed:
                    if is_news:
                        self._over = message["over"]
                    elif "place" in message:
                        self._place = Place(**message["place"])
                    act = self._act if is_news and self._over >= self._acts_on else None
                    self._changed.notify_all()
                if act is not None:
                    try:
                        act()
                    except Exception:  # the worker then waits until its collectives time out, or is killed
                        log.exception("what was to be done at the end of a generation has failed")
