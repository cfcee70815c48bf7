"""What is shown of an error: the user's frames, the root cause, nothing lost of the chain."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from elastictrain.config import MeshConfig
from elastictrain.elastic.report import HINT, Report, describe, owner, root_cause

USER = """
import json
import torch

def shapes():
    torch.nn.functional.linear(torch.zeros(2, 3), torch.zeros(4, 5))

def through_torch():
    layer = torch.nn.Sequential(Broken())
    layer(torch.zeros(1))

class Broken(torch.nn.Module):
    def forward(self, x):
        raise KeyError("no such sample")

def chained():
    try:
        through_torch()
    except KeyError as error:
        raise ValueError("step failed") from error

def context():
    try:
        shapes()
    except RuntimeError:
        json.loads("{")

def deep(n=0):
    deep(n + 1)
"""


@pytest.fixture(scope="module")
def user(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Callable[[], None]]:
    file = tmp_path_factory.mktemp("user") / "my_task.py"
    file.write_text(USER)
    spec = importlib.util.spec_from_file_location("my_task", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return vars(module)


def report_of(function: Callable[[], object]) -> Report:
    try:
        function()
    except BaseException as error:
        return describe(error, rank=1, step=7)
    raise AssertionError("nothing was raised")


def test_framework_frames_are_folded(user: dict[str, Callable[[], None]]) -> None:
    report = report_of(user["through_torch"])
    assert "in through_torch\n    layer(torch.zeros(1))" in report.text
    assert "in forward\n    raise KeyError" in report.text
    assert re.search(rf"layer\(torch.zeros\(1\)\)\n  … \d frames in torch{HINT}\n  File .*my_task.py", report.text)
    assert "_call_impl" not in report.text
    assert "_call_impl" in report.full
    assert report.line == "KeyError: 'no such sample' (my_task.py:14)"
    assert report.text.endswith("KeyError: 'no such sample'\n")


def test_chains_are_kept(user: dict[str, Callable[[], None]]) -> None:
    text = report_of(user["chained"]).text
    assert text.index("no such sample") < text.index("direct cause of the following") < text.index("step failed")
    assert text.count(HINT) == 1
    text = report_of(user["context"]).text
    assert (
        text.index("mat1 and mat2") < text.index("another exception occurred") < text.index("Expecting property name")
    )
    assert "frames in python" in text


def test_a_thousand_equal_frames_are_not_printed(user: dict[str, Callable[[], None]]) -> None:
    report = report_of(user["deep"])
    assert report.text.count("\n") < 40
    assert "Previous line repeated" in report.text


def test_an_error_without_the_users_frames_is_shown_whole() -> None:
    assert owner(sys.modules["elastictrain.config"].__file__ or "") == "elastictrain"
    assert owner(torch.__file__) == "torch"
    assert owner(__file__) is None
    assert owner("<frozen runpy>") == "python"
    program = "raise_ = lambda: 1 / 0"
    space: dict[str, Callable[[], None]] = {}
    exec(compile(program, sys.modules["elastictrain.config"].__file__ or "", "exec"), space)
    try:
        space["raise_"]()
    except ZeroDivisionError as error:
        error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next  # without the frame of this test
        report = describe(error, rank=0, step=0)
    assert report.text == report.full
    assert report.where == ""


def test_kinds() -> None:
    usage = report_of(lambda: MeshConfig.parse("dp_shard=x"))
    assert (usage.kind, usage.retry, usage.text) == ("usage", False, "")
    assert usage.message.startswith("--mesh dp_shard=x")
    leaving = report_of(lambda: sys.exit("no data"))
    assert (leaving.kind, leaving.message, leaving.retry) == ("exit", "no data", False)
    assert (report_of(lambda: sys.exit(2)).kind, report_of(lambda: sys.exit(2)).message) == ("usage", "")


def test_who_only_lost_the_others_is_not_the_cause(tmp_path: Path) -> None:
    def store() -> None:
        dist.TCPStore("127.0.0.1", 1, is_master=False, timeout=timedelta(milliseconds=50))

    def wrapped() -> None:
        try:
            raise RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:26112")
        except RuntimeError as error:
            raise RuntimeError("Failed to run stage backward") from error

    lost = [report_of(store), report_of(wrapped)]
    assert all(report.lost_peer for report in lost)
    own = report_of(lambda: [][0])
    assert not own.lost_peer
    assert root_cause([*lost, own]) is own
    assert root_cause(lost) is lost[0]
    assert root_cause([]) is None


def test_files(tmp_path: Path) -> None:
    assert Report.read(str(tmp_path), 1) is None
    report = report_of(lambda: [][0])
    report.write(str(tmp_path))
    assert Report.read(str(tmp_path), 1) == report
    assert [file.name for file in tmp_path.iterdir()] == ["rank-1.json"]
    (tmp_path / "rank-2.json").write_text("{")
    assert Report.read(str(tmp_path), 2) is None


def test_the_line_is_one_line_and_short() -> None:
    line = Report("exception", 0, error="ValueError", message="a\nb " + "x" * 1000, where="a.py:1").line
    assert "\n" not in line
    assert line.startswith("ValueError: a b xxx")
    assert line.endswith("… (a.py:1)")
    assert len(line) < 250
