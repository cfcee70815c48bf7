"""``elastictrain run`` whose agent is killed at a point of its saves; the same command goes on, and is killed at the next.

Agents and workers are forks of this process (:mod:`tests.forked`), which has imported everything; writers and keepers are
started as ever. Nothing here waits for time to pass. Who stands at a point makes a file, and stays there until ``hold`` is
gone. All that a run has started is this process's to wait for, because it is the subreaper of its descendants: when none is
left, that is known.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import torch

from elastictrain import Trainer
from elastictrain.channel import key_of
from elastictrain.checkpoint import CheckpointReader, catalog, saves, snapshots
from elastictrain.checkpoint.export import verify
from elastictrain.checkpoint.keeper_process import KeeperProcess, connect_local
from elastictrain.checkpoint.retention import sweep
from elastictrain.elastic.signals import die_with
from elastictrain.rundir import RunDir
from tests import forked
from tests.checkpoint import interrupted
from tests.checkpoint.interrupted import stand
from tests.checkpoint.states import manager
from tests.checkpoint.test_crashes import orphans
from tests.checkpoint.wide_task import Wide
from tests.cli.test_run import Command
from tests.processes import children_of, is_running

TASK = str(Path(__file__).with_name("wide_task.py"))
SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of linux/prctl.h
SECONDS = 60.0  # for what must come, whatever else this machine does
NEVER_DONE = ("planned", "staged", "room")  # points before anybody but the worker has anything


@dataclass(frozen=True)
class Stop:
    """Where a run is killed.

    Args:
        where: whose point it is: "worker" or "writer" of a save, "worker" or "keeper" of a snapshot.
        point: its name.
        rank: whose worker or writer stands there; "submitted" and "given" are passed by all ranks first.
        alone: the agent alone is killed, and what it leaves behind goes on; else that is killed at the same point.
    """

    where: str
    point: str
    rank: int = 0
    alone: bool = True

    @property
    def is_kept(self) -> bool | None:
        """Is what was being saved there in the end? None: the two that are not held may be done with it or not."""
        if self.where == "keeper":
            return self.alone
        if self.alone:
            return self.point not in NEVER_DONE
        if self.point == "submitted" or (self.rank and self.point == "manifest"):
            return None
        return self.point == "committed"

    def __str__(self) -> str:
        return f"{self.where} of rank {self.rank} at {self.point}, {'agent' if self.alone else 'all'} killed"


class Walk:
    """One run directory, and one start after another.

    Args:
        folder: for what the processes say.
        of_snapshots: snapshots are taken, and no checkpoints.
    """

    def __init__(self, url: str, folder: Path, *, num_workers: int, max_steps: int, of_snapshots: bool) -> None:
        folder.mkdir()
        self.url, self.folder, self.num_workers = url, folder, num_workers
        self.hold, self.hold_keeper = folder / "hold", folder / "hold-keeper"
        every = ["--snapshot-every", "1", "--checkpoint-every", "99"] if of_snapshots else ["--checkpoint-every", "1"]
        self.of_snapshots = of_snapshots
        self.options = ["--run-dir", url, "--max-steps", str(max_steps), "--log-every", "1", *every]
        self.options += ["--micro-batch-size", str(8 // num_workers)]
        self.options += ["--nproc-per-node", str(num_workers), "--spares", "0", "--set", f"folder={folder}"]
        self.step = 0  # that the next start goes on from
        self.run: Command | None = None

    # ---- a start -----------------------------------------------------------------------------------------------------

    def start(self, stop: Stop | None) -> Command:
        """None: it is not held."""
        for file in self.folder.iterdir():
            file.unlink()
        if stop is not None:
            self.hold.touch()
        if stop is not None and stop.where == "keeper":
            self.hold_keeper.touch()
        conductor = os.getpid()

        def prepare() -> None:  # in the agent
            die_with(conductor)
            KeeperProcess.command = tuple(self.hooked_keeper())
            forked.install(lambda: None if stop is None else self.hook(stop))

        self.run = Command(self.folder, f"{TASK}:{Wide.__name__}", *self.options, before=prepare)
        return self.run

    def hooked_keeper(self) -> list[str]:
        """It lives over several starts, and stands whenever it may."""
        return [sys.executable, "-m", "tests.checkpoint.hooked_keeper", "hash", "wait", str(self.hold_keeper)]

    def hook(self, stop: Stop) -> None:
        """In a worker, before anything."""
        rank = int(os.environ["RANK"])
        is_here = rank == stop.rank or stop.point in ("submitted", "given")

        def reached(_: object, passed: str) -> None:
            if is_here and passed == stop.point:
                stand(self.hold, f"worker-{rank}")

        seconds = "1" if stop.point in NEVER_DONE else "60"  # for what will never be whole it need not wait long
        command = interrupted.command("linger", seconds, self.hold)
        if stop.where == "writer" and is_here:
            command = interrupted.command(stop.point, "stand", self.hold)
        saves.COMMAND = tuple(command)  # type: ignore[assignment]
        if stop.where == "worker":
            saves.Saves.reached = snapshots.Snapshots.reached = reached  # type: ignore[method-assign,assignment]

    # ---- a kill ------------------------------------------------------------------------------------------------------

    def kill_at(self, stop: Stop) -> None:
        """Start, wait until it stands there, kill, and wait until nothing of it is left but a keeper that shall be."""
        run = self.start(stop)
        names = [f"worker-{rank}" for rank in range(self.num_workers)]
        if stop.point in NEVER_DONE:
            names = [f"worker-{stop.rank}"]
        if stop.where != "worker":
            names.append("at")
        while not all((self.folder / name).exists() for name in names):
            assert os.waitpid(run.pid, os.WNOHANG)[0] == 0, "the run has ended"
            time.sleep(0.005)
        keepers = [*children_of(run.pid, running="hooked_keeper"), *children_of(os.getpid(), running="hooked_keeper")]
        workers = sorted({*children_of(run.pid)} - {*keepers})
        assert len(workers) == self.num_workers
        os.kill(run.pid, signal.SIGKILL)
        for pid in (run.pid, *workers):
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL, "it outlives its agent"
        if not stop.alone:
            for pid in children_of(os.getpid()):
                os.kill(pid, signal.SIGKILL)
            keepers = []
        self.hold.unlink()
        self.hold_keeper.unlink(missing_ok=True)
        reap(but=keepers)
        assert [pid for pid in keepers if not is_running(pid)] == [], "a keeper stays for who starts the run again"

    def held(self) -> list[int]:
        """Steps of the snapshots that the keeper has whole on all ranks."""
        where = json.loads((self.folder / "keeper.json").read_text())
        channel = connect_local(where["socket"], key_of(Path(self.url, "token").read_text()), seconds=SECONDS)
        channel.send({"kind": "list"})
        steps = [one["about"]["step"] for one in channel.receive(seconds=SECONDS).head["held"]]
        channel.close()
        return [step for step in sorted(set(steps)) if steps.count(step) == self.num_workers]

    # ---- what is left ------------------------------------------------------------------------------------------------

    def stop_at(self, stop: Stop) -> None:
        """Kill it there, and see that what was good is there and loads, and nothing else is after a sweep."""
        run_dir, before = RunDir(self.url), committed(self.url)
        self.kill_at(stop)
        self.check_resumed()
        if self.of_snapshots:
            self.check_snapshots(stop)
            return
        after = committed(self.url)
        new = {path: step for path, step in after.items() if path not in before}
        assert before.items() <= after.items(), "what was good is lost"
        assert list(new.values()) == [self.step + 1] * len(new) and len(new) <= 1, new
        assert stop.is_kept in (None, bool(new)), f"{'a' if new else 'no'} new checkpoint"
        if not stop.alone and not new and stop.point not in (*NEVER_DONE, "submitted", "started", "part"):
            assert orphans(run_dir), "there is something to sweep"
        sweep(run_dir, grace=-60.0)
        assert orphans(run_dir) == [] and committed(self.url) == after
        self.step += len(new)
        self.check_newest()

    def check_resumed(self) -> None:
        assert self.run is not None
        text, where = self.run.text, "the snapshot of step" if self.of_snapshots else self.url
        assert ("resumed: from step" in text) == bool(self.step), text
        assert not self.step or f"resumed: from step {self.step} ({where}" in text, text
        assert "for a sign of life" not in text, "the lease of who is gone is free at once"

    def check_snapshots(self, stop: Stop) -> None:
        assert committed(self.url) == {}
        if not stop.alone:
            self.step = 0  # there is no checkpoint
            return
        if stop.is_kept:
            self.step += 1
        deadline = time.monotonic() + SECONDS
        while self.step and max(self.held(), default=0) != self.step:  # it may still be hashed
            assert time.monotonic() < deadline, self.held()
            time.sleep(0.01)

    def check_newest(self) -> None:
        newest = manager(self.url).newest()
        assert (newest is None) == (self.step == 0)
        if newest is None:
            return
        reader = CheckpointReader(newest)
        assert reader.step == self.step and verify(reader) == []
        reader.load({name: torch.empty(one.shape, dtype=one.dtype) for name, one in reader.tensors.items()})

    def finish(self) -> dict[str, torch.Tensor]:
        """The same command once more, and nobody kills it; the weights in the end."""
        assert self.start(None).wait() == 0, self.run.text if self.run else ""
        self.check_resumed()
        reap()
        newest = manager(self.url).newest()
        assert newest is not None
        reader = CheckpointReader(newest)
        weights = {
            name: torch.empty(one.shape, dtype=one.dtype)
            for name, one in reader.tensors.items()
            if name.startswith("model.")
        }
        reader.load(weights)
        return weights


def reap(*, but: Collection[int] = ()) -> None:
    """Wait until this process has no descendants but these."""
    while left := set(children_of(os.getpid())) - set(but):
        with contextlib.suppress(ChildProcessError):
            os.waitpid(left.pop(), 0)


def committed(url: str) -> dict[str, int]:
    """Steps of the checkpoints, by path."""
    return {one.path: one.step for one in catalog.entries(RunDir(url)) if one.commit is not None}


def walk(rank: int, world_size: int, url: str, folder: Path, num_workers: int, stops: list[Stop]) -> None:
    """From stop to stop, and then to the end, as if nothing had been. In a process of its own."""
    ctypes.CDLL(None).prctl(SUBREAPER, 1)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    max_steps = len(stops) + 2
    reference = Wide(str(folder))
    Trainer(max_steps=max_steps, micro_batch_size=8).fit(reference)  # and all is imported
    of_snapshots = any(stop.where == "keeper" or stop.point in ("room", "given") for stop in stops)
    one = Walk(url, folder, num_workers=num_workers, max_steps=max_steps, of_snapshots=of_snapshots)
    for stop in stops:
        try:
            one.stop_at(stop)
        except BaseException as error:
            raise AssertionError(f"{stop}: {error}\n{one.run.text if one.run else ''}") from error
    weights = one.finish()
    for name, weight in reference.state_dict().items():
        torch.testing.assert_close(weights[f"model.{name}"], weight, rtol=1e-3, atol=1e-5)
    shutil.rmtree(folder)
