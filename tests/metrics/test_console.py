from __future__ import annotations

import contextlib
import dataclasses
import errno
import io
from typing import Any

import pytest
from rich.console import Console

from elastictrain.config import MeshShape
from elastictrain.metrics.console import (
    Final,
    Startup,
    dashboard_command,
    evaluation_results,
    event_line,
    final_summary,
    format_count,
    format_seconds,
    format_value,
    make_console,
    print_line,
    startup_summary,
)

STARTUP = Startup(
    target="ByteLM",
    run_dir="runs/x [draft]",
    mesh=MeshShape(dp_shard=2, dp_replicate=2),
    device="cpu",
    precision="bf16",
    global_batch_size=64,
    micro_batch_size=4,
    num_slots=16,
    num_parameters=12_345_678,
    num_trainable=12_345_678,
    max_steps=1000,
)
FINAL = Final(
    outcome="finished",
    step=1000,
    samples=64_000,
    seconds=754.2,
    samples_here=40_000,
    metrics={"train/loss": 2.31034567, "val/loss": 2.4},
    best={"val/loss": (2.39, 900)},
    checkpoint="runs/x/checkpoints/step-00001000/abc",
    run_dir="runs/x",
)


def plain(show: Any, *arguments: Any) -> list[str]:
    stream = io.StringIO()
    show(*arguments, console=Console(file=stream, width=20))  # narrow: lines are not wrapped
    return stream.getvalue().splitlines()


def drawn(show: Any, *arguments: Any, width: int) -> list[str]:
    stream = io.StringIO()
    show(*arguments, console=Console(file=stream, force_terminal=True, color_system=None, width=width))
    return stream.getvalue().splitlines()


def test_the_startup_summary_is_stable_lines() -> None:
    assert plain(startup_summary, STARTUP) == [
        "elastictrain ByteLM",
        "  run directory: runs/x [draft]",
        "  mesh: dp_replicate=2, dp_shard=2 (4 ranks, cpu)",
        "  global batch: 64 samples = 16 microbatches of 4",
        "  microbatches per rank: 4",
        "  parameters: 12.3M, all trainable",
        "  precision: bf16",
        "  until: step 1000",
    ]


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"run_dir": None}, "  run directory: none: nothing is kept"),
        ({"mesh": MeshShape(), "num_nodes": 1}, "  mesh: one rank (1 rank, cpu)"),
        ({"mesh": MeshShape(dp_shard=8), "num_nodes": 2}, "  mesh: dp_shard=8 (8 ranks on 2 nodes, cpu)"),
        ({"global_batch_size": 62}, "  global batch: 62 samples = 15 microbatches of 4 and one of 2"),
        (
            {"global_batch_size": 1, "micro_batch_size": 1, "num_slots": 1},
            "  global batch: 1 sample = 1 microbatch of 1",
        ),
        ({"num_slots": 18}, "  microbatches per rank: 5 on 2 ranks, 4 on 2"),
        ({"num_slots": 3}, "  microbatches per rank: 1 on 3 ranks, 0 on 1"),
        ({"num_trainable": 1_000}, "  parameters: 12.3M, 1.00k trainable"),
        ({"max_epochs": 3}, "  until: step 1000 or epoch 3"),
        ({"max_steps": None}, "  until: stopped"),
        ({"resumed_step": 120, "resumed_from": "s3://b/x"}, "  resumed: from step 120 (s3://b/x)"),
        ({"callbacks": ("EMA", "ProgressBar")}, "  callbacks: EMA, ProgressBar"),
        ({"generation": 3}, "elastictrain ByteLM, generation 3"),
    ],
)
def test_what_the_startup_summary_says(changes: dict[str, Any], line: str) -> None:
    assert line in plain(startup_summary, dataclasses.replace(STARTUP, **changes))


def test_the_final_summary_is_stable_lines() -> None:
    assert plain(final_summary, FINAL) == [
        "elastictrain finished",
        "  trained: 1000 steps, 64000 samples",
        "  duration: 12m34s, 53 samples/s",
        "  train/loss: 2.3103",
        "  val/loss: 2.4 (best 2.39 at step 900)",
        "  run directory: runs/x",
        "  checkpoint: runs/x/checkpoints/step-00001000/abc",
        "  look: elastictrain dashboard runs/x",
    ]
    tokens = dataclasses.replace(FINAL, tokens=10**8, tokens_here=10**8, run_dir=None)
    assert plain(final_summary, tokens)[1:3] == [
        "  trained: 1000 steps, 64000 samples, 100000000 tokens",
        "  duration: 12m34s, 53 samples/s, 133k tokens/s",
    ]
    assert "  checkpoint: none" in plain(final_summary, dataclasses.replace(FINAL, checkpoint=None))
    assert (
        plain(final_summary, dataclasses.replace(FINAL, seconds=0.0, samples_here=0))[2]
        == "  duration: 0.0s, 0 samples/s"
    )


def test_evaluations() -> None:
    one = [{"val/loss": 2.31034567, "val/acc": 0.5}]
    assert plain(evaluation_results, "validate", one) == ["validate: val/loss 2.3103", "validate: val/acc 0.5"]
    two = [{"loss/dataloader_idx_0": 1.0}, {"loss/dataloader_idx_1": 2.0, "only": 3.0}]
    assert plain(evaluation_results, "test", two) == [
        "test loader 0: loss 1",
        "test loader 1: loss 2",
        "test loader 1: only 3",
    ]
    assert plain(evaluation_results, "test", []) == []
    table = drawn(evaluation_results, "test", two, width=60)
    assert [line.split() for line in table if "loss" in line or "only" in line] == [["loss", "1", "2"], ["only", "3"]]


@pytest.mark.parametrize("width", [30, 60, 100, 200])
def test_a_terminal_gets_frames_that_fit(width: int) -> None:
    results = [{"a/very/long/name/of/a/metric/that/does/not/fit": 1.0, "b": 2.0}]
    shown = drawn(startup_summary, STARTUP, width=width) + drawn(evaluation_results, "validate", results, width=width)
    final = drawn(final_summary, FINAL, width=width)
    assert all(len(line) <= width for line in shown + final[:-1])
    everything = "".join(line.strip("│ ") for line in shown + final).replace(" ", "")
    for text in ("runs/x", "[draft]" if width > 60 else "draft", "12.3M", "2.3103", "2.39", "900"):
        assert text in everything
    assert final[-1] == "  look: elastictrain dashboard runs/x"  # not wrapped, not framed: to be copied


def test_what_the_stream_cannot_encode_does_not_fail() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    named = dataclasses.replace(STARTUP, target="Größe")
    startup_summary(named, console=Console(file=stream))
    stream.flush()
    assert raw.getvalue().startswith(b"elastictrain Gr??e\n")


def test_a_full_disk_ends_nothing() -> None:
    with open("/dev/full", "w") as stream:
        console = make_console(stream)
        startup_summary(STARTUP, console=console)
        print_line("more", console=console)
        assert console.quiet
        with contextlib.suppress(OSError):
            stream.close()


def test_a_terminal_that_is_gone_ends_nothing() -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.EIO, "Input/output error")

        def isatty(self) -> bool:
            return True

    console = make_console(Gone())
    final_summary(FINAL, console=console)
    assert console.quiet


@pytest.mark.parametrize(
    ("run_dir", "command"),
    [
        ("runs/x", "elastictrain dashboard runs/x"),
        ("/a b/c", "elastictrain dashboard '/a b/c'"),
        ("s3://b/x", "elastictrain dashboard s3://b/x"),
        ("memory://x", None),
    ],
)
def test_where_to_look(run_dir: str, command: str | None) -> None:
    assert dashboard_command(run_dir) == command


def test_numbers() -> None:
    assert [format_value(v) for v in (2.310345, 1.0, 12, 0.00012345678, 1.5e9, float("nan"), float("-inf"), -3.0)] == [
        "2.3103", "1", "12", "0.00012346", "1.5e+09", "nan", "-inf", "-3",
    ]  # fmt: skip
    assert [format_count(v) for v in (0, 7, 0.123456, 99.4, 999, 999.6, 1234, 12_345, 999_900, 4.56e6, 1e12)] == [
        "0", "7", "0.123", "99.4", "999", "1.00k", "1.23k", "12.3k", "1.00M", "4.56M", "1.00T",
    ]  # fmt: skip
    assert [format_seconds(v) for v in (0.04, 9.94, 9.96, 59.6, 192, 7500, 273_600)] == [
        "0.0s", "9.9s", "10s", "1m00s", "3m12s", "2h05m", "3d04h",
    ]  # fmt: skip


EVENT = {"cause": "node-3 left with notice", "lost_steps": 0, "seconds": {"total": 0.41}, "mesh": "dp_shard=3"}


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"nodes": 3, "nodes_before": 4, "ranks": 3}, "4 → 3 nodes, mesh dp_shard=3, paused 0.4 s, 0 steps lost"),
        ({"nodes": 2, "nodes_before": 1, "ranks": 2}, "1 → 2 nodes, mesh dp_shard=3, paused 0.4 s, 0 steps lost"),
        ({"nodes": 3, "nodes_before": 3, "ranks": 3}, "3 ranks, mesh dp_shard=3, paused 0.4 s, 0 steps lost"),
        ({"nodes_before": None, "lost_steps": 1, "mesh": ""}, "paused 0.4 s, 1 step lost"),
        ({"mesh": "", "source": "s3://a/b"}, "paused 0.4 s, 0 steps lost, on from s3://a/b"),
    ],
)
def test_a_change_of_who_trains_is_one_line(more: dict[str, Any], says: str) -> None:
    assert event_line({**EVENT, **more}) == f"node-3 left with notice: {says}"


def test_a_change_without_a_cause_in_words() -> None:
    assert event_line({**EVENT, "cause": ""}).startswith("the run was stopped: mesh")
