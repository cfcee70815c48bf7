"""Callbacks that only shape the step."""

from __future__ import annotations

from typing import Any

import pytest

from elastictrain.callback import Callback
from elastictrain.callbacks import (
    ActivationCheckpointing,
    Compile,
    GradientAccumulation,
    GradientClipping,
    MixedPrecision,
)
from elastictrain.errors import UsageError
from elastictrain.step_plan import Compilation, Precision, Recompute, StepPlan, apply_plan


@pytest.mark.parametrize(
    ("callback", "changed"),
    [
        (MixedPrecision("bf16"), StepPlan(precision=Precision("bf16"))),
        (MixedPrecision("fp16"), StepPlan(precision=Precision("fp16", scale_loss=True))),
        (MixedPrecision("fp32"), StepPlan()),
        (GradientAccumulation(micro_batch_size=4), StepPlan(micro_batch_size=4)),
        (GradientClipping(norm=1), StepPlan(clip_norm=1.0)),
        (GradientClipping(value=0.5), StepPlan(clip_value=0.5)),
        (Compile(), StepPlan(compilation=Compilation())),
        (Compile(fullgraph=True, dynamic=False), StepPlan(compilation=Compilation(True, False))),
        (ActivationCheckpointing(), StepPlan(recompute=Recompute())),
        (ActivationCheckpointing("selective", every=2), StepPlan(recompute=Recompute("selective", 2))),
        (ActivationCheckpointing(patterns=["a.*"]), StepPlan(recompute=Recompute(patterns=("a.*",)))),
    ],
)
def test_it_changes_its_own_field_alone(callback: Callback, changed: StepPlan) -> None:
    assert callback.configure(StepPlan()) == changed


def test_two_that_disagree_are_refused_by_name() -> None:
    callbacks: list[Callback] = [MixedPrecision("bf16"), GradientClipping(norm=1.0), MixedPrecision("fp16")]
    with pytest.raises(UsageError, match="callbacks MixedPrecision and MixedPrecision both set precision"):
        apply_plan(StepPlan(), [(callback.name, callback.configure) for callback in callbacks])


@pytest.mark.parametrize(
    ("make", "arguments"),
    [
        (MixedPrecision, {"compute": "bf16-mixed"}),
        (MixedPrecision, {"compute": 16}),
        (GradientAccumulation, {"micro_batch_size": 0}),
        (GradientAccumulation, {"micro_batch_size": 2.0}),
        (GradientAccumulation, {"micro_batch_size": True}),
        (GradientClipping, {}),
        (GradientClipping, {"norm": 1.0, "value": 1.0}),
        (GradientClipping, {"norm": 0}),
        (GradientClipping, {"value": -1.0}),
        (GradientClipping, {"norm": float("nan")}),
        (GradientClipping, {"norm": "1"}),
        (ActivationCheckpointing, {"mode": "ful"}),
        (ActivationCheckpointing, {"every": 0}),
        (ActivationCheckpointing, {"every": 2.0}),
        (ActivationCheckpointing, {"patterns": []}),
        (ActivationCheckpointing, {"patterns": [""]}),
        (ActivationCheckpointing, {"every": 2, "patterns": ["a"]}),
    ],
)
def test_bad_arguments_are_refused(make: Any, arguments: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        make(**arguments)
    assert make.__name__ in str(caught.value)
    assert "\n" not in str(caught.value)
