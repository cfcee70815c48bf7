"""What :class:`~elastictrain.elastic.protocol.Peer` asks its driver to do, in the order in which it is to be done."""

from __future__ import annotations

from dataclasses import dataclass

from elastictrain.elastic.chain import Entry, Generation, Member, Message, Size


@dataclass(frozen=True)
class Read:
    """Read the newest entry of the log; answer with ``on_entry``, or ``on_storage_failed``."""


@dataclass(frozen=True)
class Create:
    """Create an entry if there is none with its number; answer with ``on_created``."""

    entry: Entry


@dataclass(frozen=True)
class Trim:
    """Remove entries long before this one; no answer."""

    index: int


@dataclass(frozen=True)
class Connect:
    """Open a link; answer with ``on_link``, or ``on_link_lost``."""

    link: int
    to: Member


@dataclass(frozen=True)
class Send:
    """One message to each link; those that are gone are left out."""

    links: tuple[int, ...]
    message: Message


@dataclass(frozen=True)
class Close:
    """No answer: the links are of no interest any more."""

    links: tuple[int, ...]


@dataclass(frozen=True)
class Formed:
    """There is a new generation; this node may or may not be a member."""

    generation: Generation


@dataclass(frozen=True, eq=False)
class Promise:
    """May the workers of that generation promise not to pass this step? Answer with ``on_promise``, in time.

    What was asked before is no question any more. Each one is another question, also for the same step.
    """

    number: int
    boundary: int


@dataclass(frozen=True)
class Release:
    """What was asked, or promised, is void."""


@dataclass(frozen=True)
class Resized:
    """The run has this size, whatever this node was started with."""

    size: Size


@dataclass(frozen=True)
class KeptOut:
    """This node's host was lost so many times: it is let in after so many seconds."""

    times: int
    seconds: float


@dataclass(frozen=True)
class Gone:
    """These nodes are lost, and no others, that were members no more: they may have had something to hand over still."""

    nodes: tuple[str, ...]


@dataclass(frozen=True)
class Dismissed:
    """Somebody who may has asked for this node to go; it has asked the leader to be let go."""


@dataclass(frozen=True)
class Left:
    """The run does without this node now."""


@dataclass(frozen=True)
class Closed:
    """The run is over for all."""

    reason: str


Action = (
    Read
    | Create
    | Trim
    | Connect
    | Send
    | Close
    | Formed
    | Promise
    | Release
    | Resized
    | KeptOut
    | Gone
    | Dismissed
    | Left
    | Closed
)
