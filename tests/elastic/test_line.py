"""The end of one generation, and what is done at it, is never taken for another's."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from elastictrain.elastic.line import Line, Place, Speaker

SECONDS = 20.0


def test_what_is_done_late_is_the_old_generations(monkeypatch: pytest.MonkeyPatch) -> None:
    speaker, done = Speaker(), list[str]()
    line = Line(speaker.descriptor)
    notify: Callable[[], None] = line._changed.notify_all

    def goes_ahead() -> None:
        """The worker is in the next generation before the listening thread does anything else."""
        monkeypatch.undo()
        line.when_over(lambda: done.append("new"), generation=1)
        notify()

    monkeypatch.setattr(line._changed, "notify_all", goes_ahead)
    line.when_over(lambda: done.append("old"), generation=0)
    speaker.over(0)
    assert line.wait_until_over(0, seconds=SECONDS)
    speaker.place(Place(1, "", {}))
    assert line.take(seconds=SECONDS) is not None, "what was said before has been done"
    assert done == ["old"]
    line.when_over(lambda: done.append("newest"), generation=2)
    speaker.over(1)
    speaker.place(Place(2, "", {}))
    assert line.take(seconds=SECONDS) is not None
    assert done == ["old"]
    speaker.close()
