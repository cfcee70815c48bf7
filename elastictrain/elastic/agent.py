"""The agent: gives a node's workers their places, watches them, replaces those that die, and stops them together.

:class:`Agent` is a ``SimpleElasticAgent`` whose loop is torch's own; here is what that loop asks of it: start, look,
stop. One *generation* is one membership of the run. What ends a generation:

* every worker exits with 0: the run is finished; with 75: stopped at the agreed step, everything saved;
* a worker dies or raises, as long as :class:`~elastictrain.elastic.restarts.RestartBudget` allows: the others lose it, let
  go of everything that belongs to the generation, and go on in the next one in the same processes
  (:mod:`elastictrain.lives`); the one that is gone, and those that cannot go on like this, are replaced
  (:mod:`elastictrain.elastic.crew`). The next generation goes on from the newest snapshot or checkpoint;
* a node is lost: the same on all others, and it costs no budget;
* SIGINT, SIGTERM or SIGHUP to the agent, or to any worker, is a notice for this node: all workers of all nodes stop at one
  agreed step boundary (:mod:`elastictrain.elastic.agreement`). Where nodes are left that go on, they hand their state over
  and the next generation begins without this node; where none are, or too few, they save a checkpoint. A second SIGINT
  kills this node's workers at once;
* somebody asks for this node to go (:mod:`elastictrain.elastic.control`): the same as a signal;
* a node joins: the same, and nobody leaves;
* the run gets another size: the same, and where this node is one too many, it stands by with its workers.

The agent prints one plain line per event and never a traceback: :class:`Outcome` carries the one error worth showing.
On every path out of :meth:`Agent.train` no worker is left running and the private directory is removed; where the agent
is killed, its workers are killed by the kernel.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec, WorkerState
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousError

from elastictrain.compat.torch_agent import PlacedAgent
from elastictrain.elastic.agent_config import FROM_NEWEST, LEFT_SUDDENLY, LOST, AgentConfig, Outcome
from elastictrain.elastic.agreement import Agreement
from elastictrain.elastic.causes import find_cause, is_anothers, told
from elastictrain.elastic.cells import LOST as LOST_OTHERS
from elastictrain.elastic.cells import READY, Cells, Phase, StopReason
from elastictrain.elastic.chain import Generation
from elastictrain.elastic.crew import Crew
from elastictrain.elastic.history import History
from elastictrain.elastic.keepers import Keepers
from elastictrain.elastic.line import Assignment, Place
from elastictrain.elastic.membership import EXIT_INTERRUPTED
from elastictrain.elastic.notices import Interrupted, Notices
from elastictrain.elastic.private import PrivateDir
from elastictrain.elastic.processes import place_environment, wait_for_an_end, worker_environment
from elastictrain.elastic.rendezvous import GenerationHandler, LeftError, LocalRendezvous, trouble_of
from elastictrain.elastic.report import Report
from elastictrain.elastic.restarts import Failure, RestartBudget, Unexplained
from elastictrain.elastic.stalls import Lingering, Stalls
from elastictrain.errors import EXIT_CHANGED, EXIT_FAILED, EXIT_FINISHED, EXIT_PREEMPTED, EXIT_USAGE, IN_ORDER
from elastictrain.metrics.presence import Presence
from elastictrain.metrics.published import Published

FINISHED = "finished"  # why a run is closed
LEAVE_SECONDS = 30.0  # for workers of a node that has left: loggers may still be writing
NEVER_USED_UP = 1_000_000_000  # restarts as torch counts them; ours are counted by RestartBudget


Group = Any  # torch's WorkerGroup, whose fields are declared None


class _End(Exception):
    """Leaves torch's loop with the outcome."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome)
        self.outcome = outcome


def _say(line: str) -> None:
    print(f"elastictrain: {line}", file=sys.stderr, flush=True)


class Agent(PlacedAgent):
    """One node's agent. Use :meth:`train`, in the main thread: signal handlers live there.

    Args:
        config: what to run.
        rendezvous: where to meet the other agents.
        say: prints one line about an event.
        published: takes what the workers publish; None: they need not.
        presence: is told what this node does; None: nobody wants to know.
    """

    def __init__(
        self,
        config: AgentConfig,
        rendezvous: GenerationHandler,
        *,
        say: Callable[[str], None] = _say,
        published: Published | None = None,
        presence: Presence | None = None,
    ) -> None:
        spec = WorkerSpec(
            role="trainer",
            local_world_size=config.local_world_size,
            rdzv_handler=rendezvous,
            entrypoint=config.command[0],
            max_restarts=NEVER_USED_UP,
            monitor_interval=1e-6,  # it waits as it looks at the workers
        )
        super().__init__(spec)
        self._config, self._handler, self._say, self._published = config, rendezvous, say, published
        self._budget = RestartBudget(config.max_restarts)
        self._keepers = Keepers(rendezvous.address, say)
        self._private: PrivateDir | None = None
        self._crew = Crew(
            config.command,
            environment=lambda: worker_environment(
                local_world_size=config.local_world_size, run_id=rendezvous.get_run_id()
            ),
            num_spares=config.num_spares,
            say=say,
        )
        self._cells: Cells | None = None
        self._agreement: Agreement | None = None
        self._reports = ""
        self._generation, self._job_id = -1, ""
        self._furthest = -1
        self._notices = Notices(lambda: rendezvous.waiting)
        self._reason: StopReason | None = None
        self._deadline: float | None = None
        self._lost_since: float | None = None  # workers say that they have lost others
        self._lingering, self._stalls = Lingering("", config.exit_within), Stalls(config.stall_seconds)
        self._unexplained: Unexplained | None = None
        self._has_handed_over = False  # the last generation has ended at the step that was agreed on
        self._is_kept = False  # what was trained is on storage, or with another node
        rendezvous.check = self._look_while_waiting  # type: ignore[method-assign]
        rendezvous.is_warm = self._crew.is_warm  # type: ignore[method-assign]
        self._failure = ""
        started = time.time() if config.started is None else config.started
        self._history = History(rendezvous, Presence() if presence is None else presence, started=started)

    def train(self) -> Outcome:
        """Run to the end: finished, failed, or stopped."""
        self._private = PrivateDir()
        before = self._notices.install()
        try:
            is_local = isinstance(self._handler, LocalRendezvous)
            self._crew.prepare(0 if is_local else self._config.local_world_size, folder=self._private.path)
            if self._config.keeper is not None:
                self._keepers.prepare(*self._config.keeper)
            self.run()
            raise AssertionError("torch's loop ends by _End alone")
        except _End as end:
            return end.outcome
        except Interrupted:
            line = "stopped while waiting for other nodes; no worker was running"
            return Outcome(self._notices.exit_code, self._furthest, message=line)
        except LeftError as error:
            return Outcome(EXIT_PREEMPTED, self._furthest, StopReason.PREEMPT, message=str(error))
        except RendezvousClosedError as error:
            self._is_kept = self._handler.closed == FINISHED
            code = EXIT_FINISHED if self._is_kept else EXIT_FAILED
            return Outcome(code, self._furthest, message=trouble_of(error))
        except (RendezvousError, RuntimeError, OSError) as error:
            return Outcome(EXIT_FAILED, self._furthest, message=trouble_of(error))
        finally:
            self._end_generation()
            self._crew.stop(seconds=self._config.kill_after)
            self._keepers.end(is_over=self._is_kept, is_out=self._handler.is_out)
            try:
                self._handler.shutdown()
            except Exception:  # noqa: S110 - the store may have gone with its host; nothing depends on it any more
                pass
            self._private.remove()
            for number, handler in before.items():
                signal.signal(number, handler)

    def workers_by_node(self) -> list[int]:
        return [member.workers for member in self._handler.members]

    # ---- what torch's loop asks ------------------------------------------------------------------------------------

    def _start_workers(self, worker_group: Group) -> dict[int, Any]:
        assert self._private is not None
        self._explain()
        generation, count = self._handler.generation, self._config.local_world_size
        folder = os.path.join(self._private.path, f"generation-{generation}")
        self._reports = os.path.join(folder, "reports")
        os.makedirs(self._reports)
        self._cells = Cells.create(os.path.join(folder, "cells"), count)
        self._agreement = Agreement(self._cells, self._handler, why=self._why)
        self._lost_since = None
        assignment = os.path.join(folder, "assignment.json")
        Assignment(
            agent_pid=os.getpid(),
            generation=generation,
            job_id=self._handler.job_id,
            cells=os.path.join(folder, "cells"),
            reports=self._reports,
            target=self._config.target,
            settings=self._config.settings,
            node=self._config.node,
            job=self._config.job,
            publishes=self._published is not None,
            **self._history.begins(folder, failure=self._failure, was_handed_over=self._has_handed_over),
        ).write(assignment)
        if self._published is not None:
            self._published.begin(folder, generation=generation, workers=count)
        self._keepers.begin(folder)
        self._failure, self._has_handed_over = "", False
        self._lingering = Lingering(self._reports, self._config.exit_within)
        self._stalls = Stalls(self._config.stall_seconds)
        places = [
            (worker.global_rank, Place(generation, assignment, place_environment(worker_group, worker, generation)))
            for worker in worker_group.workers
        ]
        if self._job_id != self._handler.job_id:
            self._crew.dismiss()
        self._generation, self._job_id = generation, self._handler.job_id
        return {local_rank: worker.pid for local_rank, worker in enumerate(self._crew.begin(places))}

    def _monitor_workers(self, worker_group: Group) -> RunResult:
        assert self._cells is not None and self._agreement is not None
        handler, cells = self._handler, self._cells
        wait_for_an_end(self._crew.workers, seconds=self._config.tick)
        reached = max(cells.steps())
        self._furthest = max(self._furthest, reached)
        handler.reached(reached)
        self._history.trains(cells, reached=reached)
        if handler.closed not in ("", FINISHED):
            ended = f"another node has ended the run: {handler.closed}"
            raise _End(Outcome(EXIT_FAILED, self._furthest, message=ended))
        if handler.is_superseded:
            return self._go_on()
        self._heed_signals(self._agreement, cells)
        if self._agreement.reason is StopReason.CHANGE and reached >= (self._agreement.step or 0):
            self._crew.watch(cells, give_up=lambda: handler.is_superseded or self._notices.wants_end)
        self._keepers.tick(cells, os.path.dirname(self._reports))
        self._crew.tend(cells)
        ends = [
            EXIT_CHANGED if view[READY] and worker.poll() is None else worker.poll()
            for worker, view in zip(self._crew.workers, cells.views, strict=True)
        ]
        if all(code in IN_ORDER for code in ends):
            return self._all_ended(ends)
        has_died = any(code not in (None, *IN_ORDER) for code in ends)
        if has_died or any(view[LOST_OTHERS] for view in cells.views) or self._lingering.look(self._crew.workers):
            if self._waits_for_word(cells):
                return self._go_on() if handler.has_news else RunResult(WorkerState.HEALTHY)
            if not self._after_failure(cells):
                return self._go_on()
            handler.workers_failed()
            return RunResult(WorkerState.UNHEALTHY)
        if (stall := self._stalls.look(cells, self._crew.workers)) is not None:
            self._failed(stall, Failure(reached), reached)
            handler.workers_failed()
            return RunResult(WorkerState.UNHEALTHY)
        if self._deadline is not None and time.monotonic() > self._deadline:
            self._end_generation(seconds=0)
            late = f"the workers did not stop within {self._config.grace:g} s and were killed: {LOST}"
            raise _End(Outcome(EXIT_FAILED, self._furthest, self._reason, message=late))
        return RunResult(WorkerState.HEALTHY)

    def _look_while_waiting(self) -> None:
        """Again and again inside a rendezvous; an interrupt ends that."""
        self._history.waits()
        self._notices.check()

    def _go_on(self) -> RunResult:
        """There is a newer generation, and this one has nothing more to do."""
        if self._reason is not None and (self._handler.is_out or self._unexplained is not None):
            raise _End(Outcome(EXIT_PREEMPTED, self._furthest, self._reason, message=LEFT_SUDDENLY))
        return RunResult(WorkerState.UNHEALTHY)

    def _all_ended(self, codes: list[int | None]) -> RunResult:
        """All workers have stopped as they were to."""
        assert self._agreement is not None
        agreed = self._handler.agreed
        if all(code == EXIT_FINISHED for code in codes):
            self._handler.end(FINISHED)
            self._is_kept = True
            raise _End(Outcome(EXIT_FINISHED, self._furthest))
        if agreed is not None and (self._handler.is_in(agreed) or self._stands_by(agreed)):
            self._has_handed_over = True
            if not self._handler.is_in(agreed):
                self._history.stands_by()
            return RunResult(WorkerState.UNHEALTHY)
        message = ""
        if agreed is not None and agreed.members and not agreed.is_paused:
            message = f"this node has left at step {self._furthest}; {len(agreed.members)} others go on"
        elif self._handler.is_dismissed:
            message = f"asked to stop: this node has stopped at step {self._furthest}"
        self._is_kept = agreed is not None
        left = LEAVE_SECONDS if self._deadline is None else self._deadline - time.monotonic()
        self._end_generation(seconds=max(self._config.kill_after, min(left, LEAVE_SECONDS)))
        raise _End(Outcome(EXIT_PREEMPTED, self._furthest, self._reason or self._agreement.reason, message=message))

    def _stop_workers(self, worker_group: Group) -> None:
        """Torch's loop is about to start the next generation."""
        self._end_generation(keeps=True)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        self._end_generation()

    # ---- the end of a generation -----------------------------------------------------------------------------------

    def _end_generation(self, *, seconds: float | None = None, keeps: bool = False) -> None:
        if self._cells is None:
            return
        reached = max(self._cells.steps())
        self._furthest = max(self._furthest, reached)
        noticed, seconds = time.time(), self._config.kill_after if seconds is None else seconds
        workers = list(self._crew.workers)
        num_living, ended = self._crew.end(self._generation, self._cells, seconds=seconds, keeps=keeps)
        self._history.ended(noticed if ended is None else min(noticed, ended), reached=reached, keeps=keeps)
        if keeps and self._failure:
            self._say(f"{self._failure}: restarting {self._config.all_but(num_living)} {FROM_NEWEST} ({self._budget})")
        elif keeps:  # another node is what has ended the generation, and these have not outlived it
            for worker in workers:
                report = Report.read(self._reports, worker.rank)
                if report is None or report.lost_peer or report.kind == "replace" or worker.code in (None, *IN_ORDER):
                    continue
                self._say(f"worker rank {worker.rank} (pid {worker.pid}) is replaced: {report.line or report.message}")
        if self._published is not None:
            self._published.end()
        self._cells.close()
        shutil.rmtree(os.path.dirname(self._reports), ignore_errors=True)
        self._cells, self._agreement = None, None

    def _waits_for_word(self, cells: Cells) -> bool:
        """Workers have lost others and say no more than that: whose fault it is, the nodes will know soon."""
        if self._handler.is_alone or not is_anothers(self._crew.workers, cells, self._reports):
            return False
        now = time.monotonic()
        if self._lost_since is None:
            self._lost_since = now
            self._handler.lost_a_peer()
            self._crew.over(self._generation, cells)
        return now - self._lost_since < self._handler.loss_seconds

    def _after_failure(self, cells: Cells) -> bool:
        """Whether it is to restart; False: another node's failure explains it. Raises to end the run."""
        self._crew.over(self._generation, cells)
        found = find_cause(
            self._crew.workers,
            cells,
            self._reports,
            seconds=self._config.settle,
            give_up=lambda: self._handler.has_news,
        )
        if found is None:
            return False
        cause, pid = found
        if cause.kind == "replace":
            self._say(f"{cause.message}: other processes begin")
            return False
        if cause.kind == "usage":
            self._handler.end(cause.line)
            raise _End(Outcome(EXIT_USAGE, self._furthest, report=cause))
        line, failure = told(cause, pid)
        shown, reached = cause if cause.kind != "died" else None, max(cells.steps())
        if cause.lost_peer and not self._handler.is_alone:
            self._say(f"{line}: other nodes are gone, or cannot be reached; meeting those that are left")
            self._unexplained = Unexplained(line, failure, reached, shown, self._handler.members)
            return False
        self._failed(line, failure, reached, shown=shown)
        return True

    def _explain(self) -> None:
        """Workers had lost others, and nodes have met since: that costs budget where the nodes are the same as before."""
        lost, self._unexplained = self._unexplained, None
        if lost is None or {one.node for one in lost.members} != {one.node for one in self._handler.members}:
            return
        self._failed(lost.line, lost.failure, lost.reached, shown=lost.shown)
        self._say(f"{lost.line}: restarted {FROM_NEWEST} ({self._budget})")

    def _failed(self, line: str, failure: Failure, reached: int, *, shown: Report | None = None) -> None:
        """Account for it. Raises to end the run."""
        self._failure = line
        if self._reason is not None:
            line = f"{line} while stopping: {LOST}"
            raise _End(Outcome(EXIT_FAILED, self._furthest, self._reason, shown, line))
        if not self._budget.may_restart(failure, reached=reached):
            line += self._budget.refusal
            self._handler.end(line)
            raise _End(Outcome(EXIT_FAILED, self._furthest, report=shown, message=line))

    # ---- stopping --------------------------------------------------------------------------------------------------

    def _heed_signals(self, agreement: Agreement, cells: Cells) -> None:
        handler = self._handler
        if self._notices.wants_end:
            self._end_generation(seconds=0)
            raise _End(Outcome(EXIT_INTERRUPTED, self._furthest, message=f"killed at once: {LOST}"))
        own = self._notices.reason or cells.asked()
        if own is not None and self._reason is None:
            self._reason = own
            if handler.is_alone and Phase.STARTING in cells.phases() and Phase.RUNNING not in cells.phases():
                self._end_generation()
                line = "stopped before training went on" + ("" if self._generation else ": nothing is lost")
                raise _End(Outcome(EXIT_PREEMPTED, self._furthest, self._reason, message=line))
            handler.notice()
        had_agreed = agreement.reason is not None
        agreement.tick()
        agreed = handler.agreed if agreement.reason is not None and not had_agreed else None
        if agreed is not None and self._reason is None and not (handler.is_in(agreed) or self._stands_by(agreed)):
            self._reason = StopReason.PREEMPT
        if self._reason is not None and self._deadline is None:
            self._deadline = time.monotonic() + self._config.grace
            again = "; press Ctrl-C again to stop at once without saving" if self._notices.is_by_hand else ""
            what = "all workers finish the step, save and exit"
            if not handler.is_alone:
                what = "this node's workers finish the step and leave; what the others need is handed over"
            self._say(f"stopping ({self._reason.value}): {what}{again}")
        if agreed is not None and agreed.reason:
            self._say(f"nodes change at step {agreed.boundary}: {agreed.reason}")

    def _stands_by(self, agreed: Generation) -> bool:
        """Do the others go on without this node, though nobody has asked for it to go?"""
        return bool(agreed.members) and self._reason is None and not self._handler.is_dismissed

    def _why(self, agreed: Generation) -> StopReason:
        """What the workers of all nodes are told: a checkpoint is needed where memory may not be enough."""
        if not agreed.members:
            return self._reason or StopReason.PREEMPT
        return StopReason.STORE if agreed.is_paused or len(agreed.leaving) > 1 else StopReason.CHANGE
