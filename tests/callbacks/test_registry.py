from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from elastictrain.callbacks import (
    EMA,
    ActivationCheckpointing,
    Compile,
    EarlyStopping,
    GradientAccumulation,
    GradientClipping,
    LearningRateMonitor,
    MixedPrecision,
    ProgressBar,
)
from elastictrain.callbacks.registry import known_callbacks, parse_callback, resolve_callback
from elastictrain.errors import UsageError
from elastictrain.step_plan import Compilation, Recompute

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("text", "cls", "attributes"),
    [
        (
            "activation-checkpointing:mode=selective,every=2",
            ActivationCheckpointing,
            {"recompute": Recompute("selective", 2)},
        ),
        (
            "activation-checkpointing:patterns=[blocks.*.mlp, head]",
            ActivationCheckpointing,
            {"recompute": Recompute(patterns=("blocks.*.mlp", "head"))},
        ),
        (
            "ActivationCheckpointing:patterns=head",
            ActivationCheckpointing,
            {"recompute": Recompute(patterns=("head",))},
        ),
        ("compile:fullgraph=yes,dynamic=none", Compile, {"compilation": Compilation(fullgraph=True)}),
        ("learning-rate-monitor", LearningRateMonitor, {}),
        ("ema", EMA, {"decay": 0.999, "every": 1}),
        ("EMA:decay=1e-2,every=2", EMA, {"decay": 0.01, "every": 2}),
        ("GradientClipping:norm=1", GradientClipping, {"norm": 1.0, "value": None}),
        ("gradient-clipping:value=1e-3,norm=none", GradientClipping, {"norm": None, "value": 0.001}),
        ("gradient_accumulation:micro-batch-size=4", GradientAccumulation, {"micro_batch_size": 4}),
        ("mixed-precision:compute=bf16", MixedPrecision, {"compute": "bf16"}),
        (
            "early-stopping: monitor=val/loss, patience=5 ,mode=max",
            EarlyStopping,
            {"monitor": "val/loss", "patience": 5, "mode": "max"},
        ),
        ("early-stopping:monitor='a,b'", EarlyStopping, {"monitor": "a,b"}),
        ("progress", ProgressBar, {}),
        ("ProgressBar:every=2", ProgressBar, {}),
        ("elastictrain.callbacks.ema:EMA", EMA, {"decay": 0.999}),
        ("elastictrain.callbacks.ema:EMA:decay=0.5", EMA, {"decay": 0.5}),
    ],
)
def test_it_makes_what_is_named(text: str, cls: type, attributes: dict[str, Any]) -> None:
    made = resolve_callback(text)
    assert type(made) is cls
    assert {name: getattr(made, name) for name in attributes} == attributes


def test_lightnings_callbacks_go_by_module_and_class() -> None:
    from lightning.pytorch.callbacks import LearningRateMonitor

    made = resolve_callback("lightning.pytorch.callbacks:LearningRateMonitor:logging_interval=step,log_momentum=yes")
    assert isinstance(made, LearningRateMonitor)
    assert made.logging_interval == "step"
    assert made.log_momentum is True


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gradient-cliping:norm=1", "there is no callback 'gradient-cliping'; did you mean gradient-clipping? Known: "),
        (
            "zzz",
            "Known: activation-checkpointing, compile, early-stopping, ema, gradient-accumulation, gradient-clipping, ",
        ),
        ("", "there is no callback ''"),
        (":", "there is no callback ''"),
        ("a b:C", "there is no callback 'a b'"),
        ("ema:decay", "'decay' is not NAME=VALUE; write NAME:k=v,k2=v2"),
        ("ema:decay=0.9,decay=2", "decay is given twice"),
        ("ema:dcay=.9", "EMA has no argument 'dcay'; did you mean decay? It takes decay, every"),
        ("ema:decay=high", "decay='high' is not a number"),
        ("ema:every=1.5", "every='1.5' is not a whole number"),
        ("ema:every=0", "EMA(every=0) must be a whole number of steps, at least 1"),
        ("early-stopping", "EarlyStopping needs monitor; add monitor="),
        (
            "mixed-precision:compute=bf",
            "MixedPrecision('bf') is not known: use bf16, fp16, fp8, fp32; did you mean 'bf16'?",
        ),
        ("os.path:join", "join is not a subclass of elastictrain.Callback"),
        ("elastictrain.callback:Callbak", "elastictrain.callback has no Callbak; did you mean Callback?"),
        ("no_such_module_here:X", "no_such_module_here cannot be imported: No module named 'no_such_module_here'"),
    ],
)
def test_bad_input_is_one_line_with_the_remedy(text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        resolve_callback(text)
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"--callback {text}: ")
    assert "\n" not in str(caught.value)


def test_values_go_by_annotation_and_others_are_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "registry_example.py").write_text(
        textwrap.dedent(
            """
            from __future__ import annotations
            from typing import Any, Literal, Optional
            from elastictrain import Callback

            class Example(Callback):
                def __init__(self, a: bool = True, b: Optional[int] = 1, c: str = "", d: list[int] | None = None,
                             e=None, f: Literal["x", "y"] = "x", g: int | str = 0, **more: Any):
                    self.got = dict(a=a, b=b, c=c, d=d, e=e, f=f, g=g, **more)
            """
        )
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    made: Any = resolve_callback("registry_example:Example:a=off,b=none,c=1e3,d=[1, 2],e={k: [1, v]},f=y,g=seven,h=2.5")
    assert made.got == {
        "a": False, "b": None, "c": "1e3", "d": [1, 2], "e": {"k": [1, "v"]}, "f": "y", "g": "seven", "h": 2.5,
    }  # fmt: skip
    with pytest.raises(UsageError, match="a='maybe' is not true or false"):
        resolve_callback("registry_example:Example:a=maybe")
    with pytest.raises(UsageError, match=r"e='\[1' is not YAML"):
        resolve_callback("registry_example:Example:e=[1")


def test_an_installed_entry_point_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "elastictrain_example-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: elastictrain-example\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[elastictrain.callbacks]\nmy-averages = elastictrain.callbacks.ema:EMA\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert known_callbacks()["my-averages"] == "elastictrain.callbacks.ema:EMA"
    assert isinstance(resolve_callback("my_averages:decay=0.5"), EMA)
    with pytest.raises(UsageError, match="did you mean my-averages"):
        parse_callback("my-average")


def python(code: str, *, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=60)


def test_names_are_checked_without_torch() -> None:
    code = """
import sys
from elastictrain.callbacks.registry import known_callbacks, parse_callback
assert len(known_callbacks()) >= 6
spec = parse_callback("ema:decay=0.9")
assert (spec.module, spec.cls, spec.arguments) == ("elastictrain.callbacks.ema", "EMA", {"decay": "0.9"})
assert not {"torch", "lightning", "rich", "numpy"} & set(sys.modules)
"""
    done = python(code, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_the_folder_is_not_a_package_of_its_own() -> None:
    done = python("import callbacks", cwd=ROOT)
    assert done.returncode == 1
    assert "ImportError: import elastictrain.callbacks, not callbacks" in done.stderr


def test_every_public_name_loads() -> None:
    import elastictrain.callbacks as package

    assert {type(getattr(package, name)) for name in package.__all__} == {type}
    assert set(package.__all__) <= set(dir(package))
    with pytest.raises(AttributeError, match="Nope"):
        package.Nope  # noqa: B018
