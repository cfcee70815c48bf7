"""Saves that are written while training goes on."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from elastictrain.checkpoint import CheckpointManager, CheckpointReader
from elastictrain.errors import CheckpointError
from elastictrain.machine import NICENESS
from tests.checkpoint import interrupted
from tests.checkpoint.states import manager
from tests.helpers import run_ranks


def until(condition: object, manager: CheckpointManager) -> None:
    deadline = time.monotonic() + 60.0
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        manager.look()
        time.sleep(0.01)


def values(path: str) -> list[float]:
    targets = {"w": torch.zeros(3)}
    CheckpointReader(path).load(targets)
    return targets["w"].tolist()


def test_what_is_saved_is_the_state_at_the_call(tmp_path: Path) -> None:
    """Two saves under way at a time and training that goes on change nothing in either of them."""
    checkpoints = manager(str(tmp_path), keep_last=None)
    weights = torch.zeros(3)
    infos = []
    for step in range(1, 8):
        weights.fill_(step)
        is_under_way, committed = checkpoints.begin(step, {"w": weights, "trainer.step": step})
        assert is_under_way
        infos += committed
    weights.fill_(-1)
    infos += checkpoints.wait()
    assert [info.step for info in infos] == list(range(1, 8))
    for info in infos:
        assert values(info.path) == [info.step] * 3
        assert CheckpointReader(info.path).values == {"trainer.step": info.step}
    assert not checkpoints.is_busy and checkpoints.wait() == [] and checkpoints.num_committed == 7


def stuck(tmp_path: Path, state: dict[str, Any]) -> tuple[CheckpointManager, int]:
    """A manager with a checkpoint of step 1, whose writer was stopped before it got to that of step 2; and its pid."""
    checkpoints = manager(str(tmp_path), keep_last=None, when_busy="skip")
    checkpoints.save(1, state)
    pid = checkpoints.saves.writer_pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    assert checkpoints.begin(2, state) == (True, [])
    return checkpoints, pid


def test_a_save_is_left_out_while_another_is_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = {"w": torch.zeros(3)}
    checkpoints, pid = stuck(tmp_path, state)
    assert checkpoints.begin(3, state) == (False, [])
    assert checkpoints.begin(4, state) == (False, [])
    os.kill(pid, signal.SIGCONT)
    assert [info.step for info in checkpoints.wait()] == [2]
    assert checkpoints.begin(5, state) == (True, [])
    assert [info.step for info in checkpoints.wait()] == [5]
    assert "no checkpoint of step 4: an earlier one is still being written (2 left out so far)" in caplog.text


def test_a_last_save_waits_only_so_long_for_earlier_ones(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = {"w": torch.zeros(3)}
    checkpoints, pid = stuck(tmp_path, state)
    assert checkpoints.save_last(3, state, seconds=0.3) == []
    assert "no checkpoint of step 3 was written" in caplog.text and "still being written after 0.3 s" in caplog.text
    os.kill(pid, signal.SIGCONT)
    assert [info.step for info in checkpoints.wait()] == [2]
    assert [info.step for info in checkpoints.save_last(4, state, seconds=60.0)] == [4]


@pytest.mark.slow
def test_memory_is_twice_the_state_at_most_over_200_saves(tmp_path: Path) -> None:
    """Images of the worker and its writer together, with as many saves under way as there may be; nothing else grows."""
    size, every = 5 << 20, 20

    def save(rank: int, world_size: int) -> tuple[list[tuple[int, int]], int]:
        checkpoints = manager(str(tmp_path), keep_last=1)
        state = {"w": torch.zeros(1 << 20), "v": torch.zeros(1 << 18)}
        used = []
        for step in range(1, 201):
            state["w"].fill_(step)
            checkpoints.begin(step, state)
            if step % every == 0:
                used.append(used_bytes(checkpoints))
        checkpoints.wait()
        checkpoints.begin(201, {"w": state["w"]})  # another layout
        checkpoints.wait()
        return used, shared_bytes(os.getpid())

    used, after = run_ranks(save, 1, timeout=300)[0]
    assert all(size <= images <= 2 * size + (64 << 10) for images, _ in used), used
    own = [own for _, own in used][1:]  # once all is imported
    assert max(own) - own[0] < 8 << 20, used  # 100 KB left behind by each save would be 16 MB
    assert after < 2 * size


def used_bytes(checkpoints: CheckpointManager) -> tuple[int, int]:
    """Of this process and its writer together: the images that either still holds, and their own memory."""
    writer = checkpoints.saves.writer_pid
    assert writer is not None
    images = {**images_of(os.getpid()), **images_of(writer)}
    return sum(images.values()), size_of(os.getpid(), "RssAnon") + size_of(writer, "RssAnon")


def size_of(pid: int, name: str) -> int:
    """A size in bytes of a process's status."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))


def shared_bytes(pid: int) -> int:
    return sum(images_of(pid).values())


def images_of(pid: int) -> dict[int, int]:
    """Bytes of the images that a process has mapped, by their numbers in the system."""
    found: dict[int, int] = {}
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        if "memfd:elastictrain" in line:
            span, _, _, _, inode, *_ = line.split()
            start, end = (int(one, 16) for one in span.split("-"))
            found[int(inode)] = found.get(int(inode), 0) + end - start
    return found


def test_a_failure_is_told_and_the_next_save_works(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    flag = tmp_path / "flag"
    url = str(tmp_path / "run")
    checkpoints = manager(url, writer_command=interrupted.command("manifest", str(errno.EIO), flag))
    flag.touch()
    checkpoints.begin(1, {"w": torch.zeros(3)})
    until(lambda: checkpoints.has_news, checkpoints)
    assert checkpoints.settle() == []
    assert "no checkpoint of step 1 was written to" in caplog.text and "1 failed so far" in caplog.text
    assert checkpoints.begin(2, {"w": torch.ones(3)})[0]
    (info,) = checkpoints.wait()
    assert values(info.path) == [1.0] * 3
    checkpoints.saves.finish_errands()
    assert sorted(os.listdir(Path(url) / "checkpoints")) == ["step-00000002"]


def test_a_failure_ends_the_run_where_that_is_asked_for(tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    flag.touch()
    command = interrupted.command("part", str(errno.EIO), flag)
    checkpoints = manager(str(tmp_path / "run"), writer_command=command, on_failure="raise")
    checkpoints.begin(1, {"w": torch.zeros(3)})
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 1 .* Input/output error"):
        checkpoints.wait()


def _one_fails(rank: int, world_size: int, url: str, flag: Path) -> list[int]:
    dist.init_process_group("gloo")
    command = interrupted.command("shard", "kill", flag) if rank == 1 else None
    checkpoints = manager(url, rank=rank, world_size=world_size, writer_command=command)
    state = {"w": torch.zeros(3), "v": torch.ones(3)}
    checkpoints.save(1, state)
    dist.barrier()
    flag.touch()
    checkpoints.begin(2, state)
    steps = [info.step for info in checkpoints.wait()]
    dist.barrier()
    if rank == 0:
        flag.unlink()
    dist.barrier()
    checkpoints.begin(3, state)
    steps += [info.step for info in checkpoints.wait()]
    assert checkpoints.num_failed == 1
    checkpoints.close()
    return steps


def test_a_writer_that_dies_on_one_rank_costs_one_save_on_all(tmp_path: Path) -> None:
    assert run_ranks(_one_fails, 2, str(tmp_path / "run"), tmp_path / "flag", timeout=120) == [[3], [3]]
    folders = list((tmp_path / "run" / "checkpoints").iterdir())
    assert len([folder for folder in folders if list(folder.rglob("COMMIT"))]) == 2


def test_the_writer_ends_with_its_worker(tmp_path: Path) -> None:
    checkpoints = manager(str(tmp_path))
    checkpoints.save(1, {"w": torch.zeros(3)})
    pid = checkpoints.saves.writer_pid
    assert pid is not None and os.getpriority(os.PRIO_PROCESS, pid) == min(
        19, NICENESS + os.getpriority(os.PRIO_PROCESS, 0)
    )
    assert os.getpgid(pid) == pid, "what is sent to the worker's process group is not for it"
    assert os.getsid(pid) == os.getsid(0), "where sessions are scheduled against each other, niceness counts within one"
    checkpoints.close()
    deadline = time.monotonic() + 30.0
    while os.path.exists(f"/proc/{pid}"):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_writer_has_no_torch() -> None:
    """As reported in KempnerForge#104: the thread of an async save and a barrier shared a group: deadlock."""
    code = "import sys, elastictrain.checkpoint.drain_main; print('torch' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
