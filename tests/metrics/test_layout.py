"""The charts of the "Custom Scalars" tab are in a run's event files, and have something to draw."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2, metadata

from elastictrain import CheckpointConfig, Trainer
from elastictrain.callbacks import GradientClipping, LearningRateMonitor, ThroughputMonitor
from tests.parallel.lm import LM
from tests.trainer.tasks import Recorded

pytestmark = pytest.mark.filterwarnings("ignore")


def charts(folder: Path) -> tuple[dict[str, list[str]], set[str]]:
    """Title of each chart -> what it draws; and all scalars."""
    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    scalars = set(accumulator.Tags()["scalars"])
    (event,) = {e.tensor_proto.string_val[0] for e in accumulator.Tensors(metadata.CONFIG_SUMMARY_TAG)}
    layout = layout_pb2.Layout.FromString(event)
    drawn: dict[str, list[str]] = {}
    for category in layout.category:
        for chart in category.chart:
            title = f"{category.title}: {chart.title}"
            if chart.WhichOneof("content") == "margin":
                (series,) = chart.margin.series
                drawn[title] = [tag for tag in (series.value, series.lower, series.upper) if tag in scalars]
            else:  # as the plugin does it
                drawn[title] = [tag for tag in scalars if any(re.match(one, tag) for one in chart.multiline.tag)]
    return drawn, scalars


@pytest.mark.slow
def test_every_chart_that_can_be_drawn_is(tmp_path: Path) -> None:
    config = CheckpointConfig(every_steps=2, every_seconds=None)
    callbacks = [LearningRateMonitor(), GradientClipping(norm=1.0), ThroughputMonitor(peak_tflops=1.0)]
    options = {"run_dir": str(tmp_path), "log_every": 1, "checkpoint": config, "callbacks": callbacks}
    for steps in (4, 8):  # the second start goes on in a file of its own
        Trainer(max_steps=steps, **options).fit(LM(num_layers=1))  # type: ignore[arg-type]
    drawn, scalars = charts(tmp_path / "tensorboard")
    empty = {title for title, tags in drawn.items() if not tags}
    # No loader processes, other ranks, failure or validation are here; a save may be committed after the last log step.
    assert empty - {"Checkpoints: size (GiB)"} == {
        "Throughput: microbatches ready in the loader",
        "Throughput: busy seconds of a step, by rank",
        "Elasticity: seconds of a recovery",
        "Quality: validation",
    }
    assert len(drawn["Throughput: seconds of a step: 10th, 50th, 90th percentile"]) == 3
    assert len(drawn["Throughput: seconds of a step, by part"]) == 8
    assert sorted(drawn["Goodput: goodput (%)"]) == ["goodput/percent", "goodput/percent_recent"]
    left = scalars - {tag for tags in drawn.values() for tag in tags}
    assert all(tag.startswith(("throughput/", "time/")) for tag in left), left


def test_validation_is_drawn_beside_training(tmp_path: Path) -> None:
    Trainer(run_dir=str(tmp_path), max_steps=2, global_batch_size=24, val_every=1, log_every=1).fit(Recorded())
    assert sorted(charts(tmp_path / "tensorboard")[0]["Quality: loss"]) == ["train/loss", "val/loss"]
