"""One worker process over several generations of a run.

When a worker dies, the others of its generation are alive, and wait for it in a collective. Each of them

1. is let go, with an error: its agent says that the generation is over, and the thread that hears it cuts the connections of
   the process groups (:mod:`elastictrain.parallel.severing`);
2. closes what belonged to the generation, as after any error, but tells nobody of a failure;
3. forgets the groups and everything that was cached of the old mesh, and makes the user's objects what they were before
   training (:mod:`elastictrain.origin`): nothing of the old generation can be reached any more;
4. says so, waits for its place in the next generation, and begins like a new process, but for its imports.

**What outlives a generation in a process:** the interpreter and its imports, with all that the user's code has left outside
of the objects that ``fit`` was given: module globals, class attributes, ``os.environ``; those objects, put back, and the
data that they share with what they were (:mod:`elastictrain.origin`);
:class:`~elastictrain.elastic.membership.AgentMembership` with its line to the agent and its signal handlers; the writer
process of a save that is under way, which ends by itself; what a sample costs in FLOPs. The generators of random numbers are
put back to where they were when ``fit`` began, as in a new process.

On failure: a process that cannot go on like this says so beforehand (:attr:`Lives.problem`), and is then replaced like one
that has died. So is one that is not done with the old generation in time. An error that is no consequence of a lost peer is
the process's own: it ends with it. What goes wrong between two generations ends the process, with one line that says what.
"""

from __future__ import annotations

import gc
import logging
import traceback
from collections.abc import Sequence
from typing import Any

import torch

from elastictrain.compat.torch import compiled_frames, is_compiled
from elastictrain.data.randomness import Generators
from elastictrain.elastic.membership import AgentMembership, Membership
from elastictrain.errors import GenerationOver, NothingKept, is_lost_peer
from elastictrain.origin import CannotCopy, Origin, why_not
from elastictrain.parallel.mesh import abandon, sever, severance
from elastictrain.session import Session

log = logging.getLogger(__name__)

DOUBT_SECONDS = 1.0  # that an error of unknown kind may turn out to be a consequence of another worker's end
ANSWER_SECONDS = 60.0  # for the agent to say what comes next
CHANGE_SECONDS = 600.0  # the same, where the workers of other nodes may still write a checkpoint
COMPILES = "torch.compile keeps meshes alive"

_has_trained = False  # a script may train several times: a new process would be in its first training meanwhile


class Lives:
    """Of one call of ``Trainer.fit``.

    Args:
        things: the user's module, data module and callbacks.
        loaders: the user's own loaders.

    Attributes:
        problem: why this process cannot go on in another generation; None: it can.
        needs_state: it has gone on, and the first values of weights that its module was made with are gone.
        counted_flops: of a sample, as earlier generations have counted them; None: none has.
    """

    def __init__(self, membership: Membership, things: Sequence[Any], loaders: Sequence[Any]) -> None:
        global _has_trained
        self._mine = membership if isinstance(membership, AgentMembership) else None
        self._origin: Origin | None = None
        self._generators: Generators | None = None
        self._is_between = self._has_frozen = False
        self.problem: str | None = None
        self.needs_state = False
        self.counted_flops: float | None = None
        self._compiled_before = compiled_frames()  # these know no mesh of ours
        if self._mine is None:
            self.problem = "elastictrain run has not started it"
        elif _has_trained:
            self.problem = "it has trained before"
        else:
            self.problem = next(filter(None, map(why_not, loaders)), None) or self._keep(things)
        _has_trained = True
        if self.problem is None:
            gc.collect()  # what is frozen now is not looked at again, nor ever freed if it is garbage
            gc.freeze()  # begin_again() need not look at imports
            self._has_frozen = True

    def _keep(self, things: Sequence[Any]) -> str | None:
        try:
            self._origin = Origin([thing for thing in things if thing is not None])
        except CannotCopy as error:
            return f"it cannot copy {error}"
        return None

    @property
    def notes(self) -> list[str]:
        """For the start-up summary."""
        if self._mine is None or self.problem is None or self._mine.world_size == 1:
            return []
        return [f"this process is started anew when another one is lost: {self.problem}"]

    def enter(self) -> None:
        """A generation begins.

        Raises:
            GenerationOver: and is over again.
        """
        self._is_between = False
        if self._mine is None:
            return
        if self.problem is None:
            self._mine.line.when_over(severance(), generation=self._mine.generation)
        self._mine.can_go_on(self.problem is None)
        if self._mine.is_over:  # said before there was anything to do about it
            raise GenerationOver(f"generation {self._mine.generation} is over before it has begun here")

    def draw_alike(self, device: torch.device) -> None:
        """Before the user's code is called in a generation: random numbers are those that a new process would draw here."""
        if self._generators is None:
            self._generators = Generators.now(device)
        else:
            self._generators.put_back(device)

    def check(self, session: Session) -> None:
        """Is there anything in how it trains that could not be forgotten?"""
        ranks, shape = session.ranks, session.mesh.shape
        if self.problem is None and (session.plan.compilation is not None or is_compiled(session.task)):
            self._cannot(COMPILES)
        if self.problem is None and ranks.world_size > 1 and not ranks.owns_group:
            self._cannot("the script has made the process group")
        if self.problem is None and ranks.device.type == "cuda" and (shape.tp > 1 or shape.cp > 1):
            # each thread has one, autograd has threads for each GPU, and a stale one makes numbers wrong, silently
            self._cannot("on GPUs, autograd's threads keep what DTensor caches of a mesh with tp or cp")

    def _cannot(self, problem: str) -> None:
        self.problem = problem
        if self._mine is not None:
            self._mine.can_go_on(False)

    def leave(self) -> None:
        """Training is over."""
        if self._mine is not None:
            self._mine.can_go_on(False)
            self._mine.line.when_over(None)

    def close(self) -> None:
        """``fit`` ends, well or not."""
        if self._has_frozen:
            gc.unfreeze()

    def gave_up(self, error: Exception) -> None:
        """``error`` ends ``fit``. Between two generations the agent would take no report of it."""
        if self._is_between and self._mine is not None:
            text = f"{type(error).__name__}: {error}"
            log.error(
                "worker rank %d could not go on in the next generation, and is replaced: %s", self._mine.rank, text
            )

    def _who_can(self) -> AgentMembership | None:
        """This process' membership, if it can go on in another generation."""
        if self.problem is None and compiled_frames() > self._compiled_before:
            self._cannot(COMPILES)
        return self._mine if self.problem is None else None

    def goes_on(self, error: BaseException) -> bool:
        """``error`` has ended the generation here: does this process go on in another one?"""
        if not isinstance(error, Exception):
            return False
        if self.problem is None and isinstance(error, NothingKept):
            self._cannot(str(error))
        mine = self._who_can()
        if mine is None:
            return False
        try:
            if is_lost_peer(error):
                if not self._tell(error, mine):
                    return False
                is_over = mine.line.wait_until_over(mine.generation, seconds=ANSWER_SECONDS)
            else:
                doubt = DOUBT_SECONDS if mine.world_size > 1 else 0.0  # alone, there is nobody to lose
                is_over = mine.line.wait_until_over(mine.generation, seconds=doubt)
        except SystemExit:  # the agent has no place for it
            is_over = False
        if not is_over:
            self._cannot("it has failed")
        self._is_between = is_over
        return is_over

    def _tell(self, error: Exception, mine: AgentMembership) -> bool:
        """The others and the agent, that this process has lost somebody. False: the agent cannot be told."""
        try:
            sever()  # others that wait for this one are let go as well
        except Exception as another:
            log.warning("the process groups were not aborted: %s: %s", type(another).__name__, another)
        try:
            if not mine.is_over:
                mine.lost_others(error)
        except OSError as another:  # such as a full disk
            error.add_note(f"then, as that was reported, {type(another).__name__}: {another}")
            self._cannot("it cannot report what it has lost")
            return False
        return True

    def goes_on_after_change(self) -> bool:
        """All ranks have stopped for nodes that come or go: does this process go on in the next generation?"""
        mine = self._who_can()
        if mine is None:
            return False
        mine.handed_over()
        try:
            self._is_between = mine.line.wait_until_over(mine.generation, seconds=CHANGE_SECONDS)
        except SystemExit:  # the agent has no place for it
            return False
        return self._is_between

    def begin_again(self) -> None:
        """Forget the generation, and wait for the next place; everything of it has been closed.

        Raises:
            SystemExit: there is none.
        """
        assert self._mine is not None and self._origin is not None
        abandon()
        self._origin.clear()
        gc.collect()  # modules and their hooks hold each other
        gc.freeze()  # what is left outlives generations: the next one need not look at it
        self._origin.restore()
        self.needs_state = self._origin.has_weights
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()  # the next generation may need other sizes
        self._mine.next_place()


def forget_frames(error: BaseException) -> None:
    """An error's frames hold the model that they ran in."""
    seen: set[int] = set()
    chain: list[BaseException | None] = [error]
    while chain:
        one = chain.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            chain += [one.__cause__, one.__context__]
            traceback.clear_frames(one.__traceback__)
            one.__traceback__ = None
