"""The thread that copies: it outlives what goes wrong, and keeps nothing that it has no more use for."""

from __future__ import annotations

import queue
import time
import weakref
from collections.abc import Mapping
from typing import Any

import pytest

from elastictrain.checkpoint.copies import Copier
from elastictrain.checkpoint.held import About, Held
from elastictrain.checkpoint.marked import Marked, make_shared
from tests.checkpoint.nodes import KEY


def image() -> Held:
    return Held(
        About("a snapshot", 10, 1, "run", "job", 0, 1, 100, {}),
        Marked(make_shared("image", 100), 100),
        0,
        is_copy=False,
    )


def test_whatever_goes_wrong_is_said_and_the_next_one_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    copier, told = Copier(KEY), queue.SimpleQueue[Mapping[str, Any]]()

    def send(held: Held) -> None:
        raise ValueError("unexpected")

    monkeypatch.setattr(copier, "_send", send)
    for _ in range(2):
        copier.copy(image(), told.put)
        said = told.get(timeout=60.0)
        assert (said["is"], said["text"]) == ("uncopied", "the buddy's keeper: unexpected")


def test_the_memory_of_an_image_goes_although_no_other_one_comes() -> None:
    copier, told = Copier(KEY), queue.SimpleQueue[Mapping[str, Any]]()
    held = image()
    memory = weakref.ref(held.memory)
    copier.copy(held, told.put)
    del held
    assert told.get(timeout=60.0)["is"] == "uncopied"
    deadline = time.monotonic() + 60.0
    while memory() is not None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
