"""What commands share that look into a run directory.

On failure: a directory that cannot be read is a :class:`~elastictrain.errors.UsageError`: one line with the remedy.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from elastictrain.errors import UsageError


@contextmanager
def reading(run_dir: str) -> Iterator[None]:
    """Around everything that reads from it."""
    from elastictrain.rundir import answering, without_user

    shown = without_user(run_dir)

    with answering(lambda error, line: UsageError(f"{shown} cannot be read ({line}): check the path and credentials")):
        yield
