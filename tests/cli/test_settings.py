"""--set: every annotation, and what is said when a value does not fit."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Optional

import pytest
import torch
from lightning.pytorch import LightningModule

from elastictrain import Task
from elastictrain.cli.settings import Signature
from elastictrain.errors import UsageError


class Colour(enum.Enum):
    RED = "red"
    BLUE = 2


class Everything(Task):
    def __init__(
        self,
        dim: int,
        lr: float = 1e-3,
        bias: bool = True,
        name: str = "x",
        *,
        top_k: int | None = None,
        label: Optional[str] = None,  # noqa: UP045 - people write it
        act: Literal["relu", "gelu", 3] = "relu",
        widths: list[int] = [],  # noqa: B006
        betas: tuple[float, float] = (0.9, 0.99),
        sizes: tuple[int, ...] = (),
        names: Sequence[str] = (),
        extra: dict[str, int] | None = None,
        where: Path = Path(),
        colour: Colour = Colour.RED,
        either: int | str = 0,
        tagged: Annotated[int, "tag"] = 0,
        bare=3,
        flag=False,
        free=None,
        tensor: torch.Tensor | None = None,
    ) -> None:
        super().__init__()


SIGNATURE = Signature.of(Everything)


def read(key: str, value: Any) -> Any:
    return SIGNATURE.convert({"dim": "1", key: value})[key]


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("dim", "12", 12),
        ("dim", "1e3", 1000),
        ("lr", "3e-4", 3e-4),
        ("lr", "1", 1.0),
        ("bias", "false", False),
        ("bias", "Yes", True),
        ("bias", "0", False),
        ("name", "123", "123"),
        ("name", "", ""),
        ("top_k", "none", None),
        ("top_k", "5", 5),
        ("label", "null", None),
        ("label", "some text", "some text"),
        ("act", "gelu", "gelu"),
        ("act", "3", 3),
        ("widths", "1,2, 3", [1, 2, 3]),
        ("widths", "[1, 2]", [1, 2]),
        ("widths", "", []),
        ("betas", "0.8,0.95", (0.8, 0.95)),
        ("sizes", "4,5,6", (4, 5, 6)),
        ("names", "a,b", ["a", "b"]),
        ("extra", "{a: 1}", {"a": 1}),
        ("extra", "none", None),
        ("where", "/data/x", Path("/data/x")),
        ("colour", "BLUE", Colour.BLUE),
        ("colour", "red", Colour.RED),
        ("either", "7", 7),
        ("either", "seven", "seven"),
        ("tagged", "7", 7),
        ("bare", "0.5", 0.5),
        ("bare", "4", 4),
        ("flag", "on", True),
        ("free", "1e-3", 1e-3),
        ("free", "[1, two]", [1, "two"]),
        ("free", "word", "word"),
    ],
)
def test_text(key: str, text: str, value: Any) -> None:
    got = read(key, text)
    assert got == value
    assert type(got) is type(value)


def test_not_a_number_is_a_float() -> None:
    assert read("lr", "nan") != read("lr", "nan")


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("dim", 12, 12),
        ("lr", 1, 1.0),
        ("bias", False, False),
        ("widths", [1, 2], [1, 2]),
        ("extra", {"a": 1}, {"a": 1}),
        ("top_k", None, None),
        ("betas", [0.1, 0.2], (0.1, 0.2)),
        ("lr", "1e-3", 1e-3),
        ("free", {"a": [1]}, {"a": [1]}),
    ],
)
def test_values_of_a_config_file(key: str, value: Any, expected: Any) -> None:
    assert read(key, value) == expected


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("dim", "big", "--set dim=big: Everything wants dim to be a whole number"),
        ("dim", "1.5", "--set dim=1.5: Everything wants dim to be a whole number"),
        ("dim", True, "a whole number"),
        ("dim", 1.5, "a whole number"),
        ("lr", "fast", "--set lr=fast: Everything wants lr to be a number"),
        ("lr", True, "a number"),
        ("bias", "maybe", "true or false"),
        ("bias", 1.0, "true or false"),
        ("name", 12, r"text \(put it in quotes\)"),
        ("name", False, r"text \(put it in quotes\)"),
        ("top_k", "some", "a whole number or none"),
        ("act", "tanh", "one of relu, gelu, 3"),
        ("widths", "1,x", "a list, each a whole number: 1,2 or"),
        ("widths", {"a": 1}, "a list"),
        ("betas", "0.9", r"a list of a number, a number \(1 values\)"),
        ("extra", "[1]", "dict"),
        ("extra", "{a: b}", "dict"),
        ("colour", "green", "one of RED, BLUE"),
        ("free", "[1", "not YAML"),
        ("tensor", "1", "Tensor"),
    ],
)
def test_a_wrong_value(key: str, value: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        read(key, value)
    assert "\n" not in str(caught.value)


def test_an_unknown_key() -> None:
    with pytest.raises(
        UsageError, match=r"--set dimm=3: Everything has no argument dimm; did you mean dim\? it takes dim, lr"
    ):
        SIGNATURE.convert({"dim": "1", "dimm": "3"})


def test_a_missing_argument() -> None:
    with pytest.raises(UsageError, match="Everything needs dim: add --set dim=…"):
        SIGNATURE.convert({"lr": "1"})


class NoInit(LightningModule):
    pass


class Open(Everything):
    def __init__(self, width: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)


class Inherits(Everything):
    pass


def test_bases() -> None:
    with pytest.raises(UsageError, match="NoInit has no argument dim; it takes no arguments"):
        Signature.of(NoInit).convert({"dim": "1"})
    assert Signature.of(Inherits).convert({"dim": "1"}) == {"dim": 1}
    opened = Signature.of(Open)
    assert opened.convert({"width": "2", "dim": "3", "lr": "4"}) == {"width": 2, "dim": 3, "lr": 4.0}
    assert not opened.open, "its base takes no others"


class Anything(LightningModule):
    def __init__(self, dim: int = 1, **kwargs: Any) -> None:
        super().__init__()
        self.kwargs = kwargs


def test_any_key_with_kwargs() -> None:
    assert Signature.of(Anything).convert({"dim": "2", "what": "1.5", "so": "ever"}) == {
        "dim": 2,
        "what": 1.5,
        "so": "ever",
    }
