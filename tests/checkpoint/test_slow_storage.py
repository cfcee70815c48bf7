"""An S3 server that stays slow: saves come faster than they are written.

What then happens is what ``when_busy`` says, the memory is bounded, a process that ends does not wait for the storage, and
what it leaves is swept.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Literal

import pytest
import torch

from elastictrain.checkpoint import CheckpointManager, CheckpointReader, saves
from elastictrain.checkpoint.footprint import MAX_SAVES
from elastictrain.rundir import RunDir
from tests.checkpoint import interrupted
from tests.checkpoint.nodes import wait_until
from tests.checkpoint.proxy import Proxy
from tests.checkpoint.states import expected, load_all, manager
from tests.checkpoint.test_background import images_of, size_of
from tests.checkpoint.test_crashes import check_swept, orphans
from tests.processes import is_running

pytestmark = pytest.mark.slow

SIZE = 4 << 20  # bytes of the state
PAUSE = 0.03  # seconds for each request, and for each MB
NUM_SAVES = 4


class Slow:
    """A manager on storage that has become slow.

    Attributes:
        own: bytes of the writer's own memory, by saves.
    """

    def __init__(self, url: str, proxy: Proxy, when_busy: Literal["queue", "skip"]) -> None:
        self.manager = manager(url, when_busy=when_busy, keep_last=None)
        self.own: list[int] = []
        self.manager.save(1, self._state(1))  # all is imported, and the memory is there
        proxy.pause, proxy.fault = PAUSE, lambda method, path: "slow"

    @staticmethod
    def _state(step: int) -> dict[str, torch.Tensor]:
        return {"w": torch.full((SIZE // 4,), float(step))}

    def begin(self, step: int) -> bool:
        """Whether it is under way. The images are as many as may be."""
        is_under_way, _ = self.manager.begin(step, self._state(step))
        writer = self.manager.saves.writer_pid
        assert writer is not None
        assert max(len(self.manager._staging._arenas), len(images_of(writer))) <= MAX_SAVES
        self.own.append(size_of(writer, "RssAnon"))
        return is_under_way

    def check(self, steps: list[int]) -> None:
        """These are on storage, each as it was; the writer has kept none of them."""
        self.manager.wait()
        assert self.manager.num_committed == len(steps) + 1 and self.manager.num_failed == 0
        for entry in self.manager.run_dir.names("checkpoints"):
            (attempt,) = self.manager.run_dir.names("checkpoints", entry)
            targets = {"w": torch.zeros(SIZE // 4)}
            CheckpointReader(f"{self.manager.run_dir}/checkpoints/{entry}/{attempt}").load(targets)
            assert targets["w"].unique().tolist() == [int(entry.removeprefix("step-"))]
        assert max(self.own) - self.own[0] < 3 * SIZE, self.own


def test_saves_queue_and_training_waits_for_memory_alone(
    proxy: Proxy, s3_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(saves, "LONG_SECONDS", 0.0)
    slow = Slow(s3_url, proxy, "queue")
    for step in range(2, 2 + NUM_SAVES):
        assert slow.begin(step)
        if step == 3:
            assert slow.manager.saves.num_waited == 0 and slow.manager.num_committed == 1, "there is a second image"
    waits = slow.manager.saves.num_waited
    assert waits >= NUM_SAVES - MAX_SAVES - 1 and slow.manager.saves.waited > 0
    assert f"({waits} waits so far): storage is slower than saves come" in caplog.text
    slow.check(list(range(2, 2 + NUM_SAVES)))


def test_saves_are_left_out_and_training_never_waits(
    proxy: Proxy, s3_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    slow = Slow(s3_url, proxy, "skip")
    look = slow.manager.saves.look

    def only_look(timeout: float = 0.0) -> None:
        assert timeout == 0.0, "it waits"
        look(timeout)

    begun, step = list[int](), 1
    with monkeypatch.context() as patch:
        patch.setattr(slow.manager.saves, "look", only_look)
        while len(begun) < 2:
            step += 1
            begun += [step] if slow.begin(step) else []
            time.sleep(0.01)  # a step of training
    left_out = step - 1 - len(begun)
    assert slow.manager.saves.num_skipped == left_out > 0
    assert f"({left_out} left out so far)" in caplog.text
    slow.check(begun)


def test_a_process_that_ends_leaves_what_storage_does_not_take(
    proxy: Proxy, s3_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its writer goes on for a bounded time; what is left is a part of an upload, and is swept."""
    checkpoints: CheckpointManager = manager(s3_url, writer_command=interrupted.command("linger", "1", tmp_path))
    first = checkpoints.save(1, expected())
    proxy.fault = lambda method, path: "stuck" if "partNumber=" in path else None
    sent = len(proxy.seen)
    for step in (2, 3):
        assert checkpoints.begin(step, expected())[0]
    wait_until(lambda: any("partNumber=" in path for _, path in proxy.seen[sent:]))
    writer = checkpoints.saves.writer_pid
    assert writer is not None
    assert checkpoints.save_last(4, expected(), seconds=0.3) == []
    assert "earlier ones are still being written after 0.3 s" in caplog.text
    checkpoints.close()
    wait_until(lambda: not is_running(writer))
    proxy.fault = lambda method, path: None
    assert orphans(RunDir(s3_url)), "there is something to sweep"
    assert manager(s3_url).newest() == first.path
    load_all(first.path)
    check_swept(s3_url, num_whole=1)
