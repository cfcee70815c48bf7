"""Which charts TensorBoard's "Custom Scalars" tab shows of a run: throughput, goodput, elasticity, checkpoints, quality.

A chart draws every tag that one of its regular expressions matches from the beginning; one whose tags are not logged stays
empty. Margin charts draw a value between two others.
"""

from __future__ import annotations

from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
from tensorboard.compat.proto.tensor_pb2 import TensorProto  # type: ignore[import-untyped]
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto  # type: ignore[import-untyped]
from tensorboard.compat.proto.types_pb2 import DT_STRING  # type: ignore[import-untyped]
from tensorboard.plugins.custom_scalar import layout_pb2, metadata  # type: ignore[import-untyped]

# Category -> title of a chart -> regular expressions of its tags.
CHARTS: dict[str, dict[str, list[str]]] = {
    "Throughput": {
        "samples per second": ["throughput/samples_per_second$"],
        "tokens per second": ["throughput/tokens_per_second$"],
        "TFLOP/s of a device": ["throughput/tflops_per_device$"],
        "model FLOPs utilisation": ["throughput/mfu$"],
        "seconds of a step, by part": [
            r"time/(data|forward_backward|communication|optimizer|hooks|callbacks|logging|device|other)$"
        ],
        "busy seconds of a step, by rank": ["rank/busy$"],
        "slow steps": [r"time/step_(p50|p90|p99|max)$"],
        "microbatches ready in the loader": ["throughput/loader_queue$"],
        "memory (GiB)": ["memory/.*_gib$"],
    },
    "Goodput": {
        "goodput (%)": ["goodput/percent$", "goodput/percent_recent$"],
        "node-seconds lost, by cause": ["goodput/lost/.*"],
    },
    "Elasticity": {
        "ranks": ["elastic/world_size$"],
        "generation": ["elastic/generation$"],
        "seconds of a recovery": ["elastic/recovery_seconds$", "elastic/change_seconds$"],
    },
    "Checkpoints": {
        "seconds": ["checkpoint/stall_seconds$", "checkpoint/seconds$"],
        "size (GiB)": ["checkpoint/gib$"],
    },
    "Quality": {
        "loss": ["(train|val)/loss(_step|_epoch)?$"],
        "training": ["train/(?!loss).*"],
        "validation": ["val/(?!loss).*"],
        "learning rate": ["lr/.*"],
    },
}

# Category -> title of a chart -> value, lower, upper: whole tags.
MARGINS: dict[str, dict[str, tuple[str, str, str]]] = {
    "Throughput": {
        "seconds of a step: 10th, 50th, 90th percentile": ("time/step_p50", "time/step_p10", "time/step_p90")
    },
}


def layout_summary() -> Summary:
    """The layout as the plugin reads it from an event file."""
    categories = []
    for name, charts in CHARTS.items():
        made = [
            layout_pb2.Chart(title=title, multiline=layout_pb2.MultilineChartContent(tag=tags))
            for title, tags in charts.items()
        ]
        for title, (value, lower, upper) in MARGINS.get(name, {}).items():
            series = layout_pb2.MarginChartContent.Series(value=value, lower=lower, upper=upper)
            made.append(layout_pb2.Chart(title=title, margin=layout_pb2.MarginChartContent(series=[series])))
        categories.append(layout_pb2.Category(title=name, chart=made))
    layout = layout_pb2.Layout(category=categories).SerializeToString()
    tensor = TensorProto(dtype=DT_STRING, string_val=[layout], tensor_shape=TensorShapeProto())
    about = metadata.create_summary_metadata()
    return Summary(value=[Summary.Value(tag=metadata.CONFIG_SUMMARY_TAG, tensor=tensor, metadata=about)])
