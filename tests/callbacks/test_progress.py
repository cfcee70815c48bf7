"""The bar on a real pseudo-terminal, the lines in a real file, and what a step costs."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import struct
import sys
import termios
import time
import traceback
import warnings
from fcntl import ioctl
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

from elastictrain.callback import RunInfo, SaveInfo, StepInfo, ValidationInfo
from elastictrain.callbacks import ProgressBar
from elastictrain.config import MeshShape
from elastictrain.errors import UsageError
from elastictrain.metrics.console import make_console


def run_info(*, rank: int = 0, step: int = 0, max_steps: int | None = 100, max_epochs: int | None = None) -> RunInfo:
    return RunInfo(
        nn.Identity(), None, rank, 2, 0, MeshShape(dp_replicate=2), step, 8 * step, 0, max_steps, max_epochs, 8, 4, 2
    )


def step_info(step: int, **more: Any) -> StepInfo:
    values: dict[str, Any] = {
        "samples": 8 * step,
        "tokens": 0,
        "epoch": 0,
        "loss": None,
        "metrics": None,
        "progress": {},
    }
    return StepInfo(step=step, epoch_steps=None, **{**values, **more})


def lines_of(path: Path) -> list[str]:
    return path.read_text().splitlines()


def test_the_line_says_how_well_it_goes(tmp_path: Path) -> None:
    with open(tmp_path / "out", "w") as out:
        bar = ProgressBar(console=Console(file=out))
        bar.on_generation_start(run_info()._replace(generation=2))
        values = {"train/loss": 2.5, "throughput/mfu": 0.4126, "goodput/percent": 97.25}
        bar.on_step_end(step_info(5, metrics=values))
        bar.on_generation_end(run_info())
    assert lines_of(tmp_path / "out") == ["step 5/100  loss 2.5  MFU 41.3%  goodput 97.2%  2 ranks gen 2"]


# ---- plain lines ---------------------------------------------------------------------------------------------------


def test_lines_come_by_time_and_at_validation_save_and_end(tmp_path: Path) -> None:
    with open(tmp_path / "out", "w") as out:
        bar = ProgressBar(every=1.0, console=Console(file=out, width=20))
        bar.on_fit_start(run_info())
        bar.on_generation_start(run_info())
        begin, step = time.monotonic(), 0
        while time.monotonic() < begin + 3.3:
            step += 1
            metrics = {"train/loss": 2.5, "lr": 0.1} if step % 5 == 0 else None
            bar.on_step_end(step_info(step, tokens=80 * step, metrics=metrics, progress={"acc": torch.tensor(0.25)}))
            time.sleep(0.01)
        bar.on_validation_end(ValidationInfo(step, 8 * step, 0, {"val/loss": 2.25, "val/acc": 0.5}))
        bar.on_save(SaveInfo(step, "/run/checkpoints/step-[1]", 0.25, 12_345_678))
        bar.on_step_end(step_info(step + 1, progress={"acc": torch.tensor(0.25), "val/loss": torch.tensor(9.0)}))
        bar.on_generation_end(run_info(step=step + 1))
        bar.on_fit_end(run_info(step=step + 1))
    lines = lines_of(tmp_path / "out")
    periodic = [
        line
        for line in lines
        if re.match(r"step \d+/\d+  loss 2\.5  eta \S+  \S+ samples/s  \S+ tokens/s  2 ranks  acc 0\.25$", line)
    ]
    assert len(periodic) == 3, lines  # after 1, 2 and 3 seconds
    assert lines[-3] == f"step {step}  validation: val/loss 2.25  val/acc 0.5"
    assert lines[-2] == f"step {step}  saved /run/checkpoints/step-[1] (12.3MB, 0.2s)"
    assert lines[-1].startswith(f"step {step + 1}/") and lines[-1].endswith("acc 0.25  val/loss 2.25")
    assert len(lines) == 6


def test_speed_and_time_left_are_right(tmp_path: Path) -> None:
    with open(tmp_path / "out", "w") as out:
        bar = ProgressBar(every=1.0, console=Console(file=out))
        bar.on_generation_start(run_info(step=1000, max_steps=2000))
        begin = time.monotonic()
        while (passed := time.monotonic() - begin) < 1.4:
            step = 1001 + int(passed * 100)  # 100 steps, 800 samples, 8000 tokens a second
            bar.on_step_end(step_info(step, tokens=80 * step, metrics={"train/loss": 1.0}))
            time.sleep(0.002)
        bar.on_generation_end(run_info())
    line = lines_of(tmp_path / "out")[0]
    samples = float(re.search(r"(\S+) samples/s", line)[1])  # type: ignore[index]
    tokens = float(re.search(r"(\S+)k tokens/s", line)[1])  # type: ignore[index]
    left = float(re.search(r"eta (\S+)s", line)[1])  # type: ignore[index]
    assert 760 < samples < 840
    assert 7.6 < tokens < 8.4
    assert 8.2 < left < 9.8


def test_a_short_run_still_says_how_it_ended(tmp_path: Path) -> None:
    with open(tmp_path / "out", "w") as out:
        bar = ProgressBar(console=Console(file=out))
        bar.on_generation_start(run_info(max_steps=3))
        for step in (1, 2, 3):
            bar.on_step_end(step_info(step, metrics={"train/loss": 0.5}))
        bar.on_generation_end(run_info(step=3))
        bar.on_fit_end(run_info(step=3))
    assert len(lines_of(tmp_path / "out")) == 1
    assert lines_of(tmp_path / "out")[0].startswith("step 3/3  loss 0.5")


@pytest.mark.parametrize(
    ("run", "more", "start"),
    [
        ({"max_steps": None}, {}, "step 5  2 ranks"),
        ({"max_steps": None, "max_epochs": 3}, {"epoch_steps": 10, "epoch": 2}, "step 5/30  2 ranks  epoch 2"),
        ({"max_steps": 20, "max_epochs": 3}, {"epoch_steps": 10}, "step 5/20  2 ranks  epoch 0"),
        ({"max_steps": 40, "max_epochs": 3}, {"epoch_steps": 10}, "step 5/30  2 ranks  epoch 0"),
        ({"max_steps": None, "max_epochs": 3}, {}, "step 5  2 ranks"),
        ({"max_steps": 4}, {}, "step 5/5  2 ranks"),
    ],
)
def test_the_total(tmp_path: Path, run: dict[str, Any], more: dict[str, Any], start: str) -> None:
    with open(tmp_path / "out", "w") as out:
        bar = ProgressBar(console=Console(file=out))
        bar.on_generation_start(run_info(**run))
        bar.on_step_end(step_info(5)._replace(**more))
        bar.on_generation_end(run_info(step=5))
    assert lines_of(tmp_path / "out") == [start]


def test_other_ranks_say_nothing(tmp_path: Path) -> None:
    with open(tmp_path / "out", "w") as out:
        bar = ProgressBar(every=0.001, console=Console(file=out, force_terminal=True))
        bar.on_generation_start(run_info(rank=1))
        for step in range(1, 10):
            bar.on_step_end(step_info(step, metrics={"train/loss": 1.0}))
        bar.on_validation_end(ValidationInfo(9, 72, 0, {"val/loss": 1.0}))
        bar.on_save(SaveInfo(9, "x", 1.0, 1))
        bar.on_exception(RuntimeError())
        bar.on_generation_end(run_info(rank=1, step=9))
        bar.on_fit_end(run_info(rank=1, step=9))
    assert (tmp_path / "out").read_text() == ""


def test_a_reader_who_leaves_does_not_end_training() -> None:
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as out:
        bar = ProgressBar(console=make_console(out))
        bar.on_generation_start(run_info())
        bar.on_step_end(step_info(1))
        os.close(reading)
        bar.on_validation_end(ValidationInfo(1, 8, 0, {"val/loss": 1.0}))
        bar.on_save(SaveInfo(1, "x", 1.0, 1))
        bar.on_step_end(step_info(2))
        bar.on_generation_end(run_info(step=2))
        try:
            out.close()
        except BrokenPipeError:
            pass


def test_the_seconds_between_lines_are_checked() -> None:
    with pytest.raises(UsageError, match=r"ProgressBar\(every=0\)"):
        ProgressBar(every=0)


# ---- a terminal ----------------------------------------------------------------------------------------------------


def train(how: str) -> None:
    bar = ProgressBar()
    bar.on_generation_start(run_info(max_steps=40))
    try:
        for step in range(1, 41):
            time.sleep(0.015)
            bar.on_step_end(step_info(step, metrics={"train/loss": 2.5}, progress={"acc": torch.tensor(0.75)}))
            if step == 10:
                print("the user's print")
                print("half a line, ", end="")
                print("the other half")
                print("to stderr", file=sys.stderr)
                warnings.warn("a warning", stacklevel=1)
            if step == 20:
                bar.on_validation_end(ValidationInfo(20, 160, 0, {"val/loss": 2.25}))
            if step == 30 and how == "raise":
                raise KeyError("the user's error")
            if step == 30 and how == "exit":
                os._exit(3)
        bar.on_generation_end(run_info(step=40))
    except KeyError as error:
        bar.on_exception(error)
        raise
    bar.on_fit_end(run_info(step=40))
    print("after")


def on_a_terminal(how: str, *, width: int, term: str = "xterm-256color") -> tuple[int, str]:
    """What a terminal of ``width`` columns received from a process that trains on it, and its exit status."""
    ours, theirs = pty.openpty()
    ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
    if (pid := os.fork()) == 0:
        os.dup2(theirs, 1)
        os.dup2(theirs, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w", encoding="utf-8"), os.fdopen(2, "w", encoding="utf-8")
        for name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR"):
            os.environ.pop(name, None)
        os.environ["TERM"] = term
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *_: print(message, file=sys.stderr)  # as the default one, in one line
        status = 0
        try:
            train(how)
        except BaseException:
            traceback.print_exc()
            status = 1
        sys.stdout.flush()
        os._exit(status)
    os.close(theirs)
    received, deadline = b"", time.monotonic() + 60
    try:
        while time.monotonic() < deadline:
            if select.select([ours], [], [], 0.5)[0]:
                try:
                    received += os.read(ours, 65536)
                except OSError:  # the other end is closed
                    break
        else:
            os.kill(pid, signal.SIGKILL)
    finally:
        os.close(ours)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return status, received.decode()


def screen(received: str, *, width: int) -> list[str]:
    """The lines a terminal shows after ``received``: enough of ECMA-48 for what rich sends, anything else fails."""
    rows, row, column = [""], 0, 0
    for control, text in re.findall(r"(\x1b\[[0-9;?]*[A-Za-z]|\r|\n)|([^\x1b\r\n]+)", received):
        for letter in text:
            if column == width:
                row, column = row + 1, 0
                rows += [""] * (row + 1 - len(rows))
            line = rows[row].ljust(column)
            rows[row] = line[:column] + letter + line[column + 1 :]
            column += 1
        if control == "\r":
            column = 0
        elif control == "\n":
            row += 1
            rows += [""] * (row + 1 - len(rows))
        elif control[-1:] == "A":
            row = max(0, row - int(control[2:-1] or 1))
        elif control == "\x1b[2K":
            rows[row] = ""
        elif control:
            assert control[-1] == "m" or control in ("\x1b[?25l", "\x1b[?25h"), repr(control)
    return [line.rstrip() for line in rows]


@pytest.mark.parametrize("width", [100, 30])
def test_the_bar_stays_below_what_the_user_prints(width: int) -> None:
    status, received = on_a_terminal("finish", width=width)
    shown = screen(received, width=width)
    assert status == 0, received
    assert shown[:4] == ["the user's print", "half a line, the other half", "to stderr", "a warning"]
    validation = "step 20  validation: val/loss 2.25"
    assert "".join(line.ljust(width) for line in shown[4:-3]).rstrip() == validation  # wrapped by the terminal itself
    bar, after, empty = shown[-3:]
    assert (after, empty) == ("after", "")
    assert "step 40/40  loss 2.5" in bar
    assert len(bar) <= width
    if width == 100:
        assert bar.startswith("━━━━━━━━")
        assert bar.endswith("samples/s  2 ranks  acc 0.75")


@pytest.mark.parametrize("how", ["raise", "exit"])
def test_an_end_before_the_end_leaves_the_terminal_as_it_should_be(how: str) -> None:
    status, received = on_a_terminal(how, width=100)
    assert status == {"raise": 1, "exit": 3}[how]
    assert received.rfind("\x1b[?25h") > received.rfind("\x1b[?25l")  # the cursor is there
    if how == "raise":
        shown = screen(received, width=100)
        bar = next(i for i, line in enumerate(shown) if "step 30/40" in line)
        assert shown[bar + 1].startswith("Traceback")
        assert 'KeyError: "the user\'s error"' in shown


def test_a_dumb_terminal_gets_lines() -> None:
    status, received = on_a_terminal("finish", width=100, term="dumb")
    assert status == 0
    assert "\x1b" not in received
    assert received.splitlines()[-2].startswith("step 40/40  loss 2.5")


# ---- cost ----------------------------------------------------------------------------------------------------------


def test_a_step_costs_less_than_a_microsecond_between_refreshes(tmp_path: Path) -> None:
    with open(tmp_path / "out", "w") as out:
        bar = ProgressBar(console=Console(file=out, force_terminal=True, width=120))
        bar.on_generation_start(run_info(max_steps=10**6))
        info = step_info(1)
        bar.on_step_end(info)  # refreshes
        took = []
        for _ in range(50):
            begin = time.perf_counter()
            for _ in range(1000):
                bar.on_step_end(info)
            took.append((time.perf_counter() - begin) / 1000 * 1e6)
        refresh = []
        for step in range(2, 52):
            bar._next = 0.0
            begin = time.process_time()
            bar.on_step_end(step_info(step, metrics={"train/loss": 2.5}))
            refresh.append((time.process_time() - begin) * 1e6)
        bar.on_generation_end(run_info())
    print(f"on_step_end: {min(took):.2f} µs; refresh: {sorted(refresh)[25]:.0f} µs")
    assert min(took) < 1.0
