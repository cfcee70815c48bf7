"""The only file that touches private names of Hugging Face datasets; pinned by tests/compat/test_datasets.py.

A streaming dataset does not say in public what it is made of, and some of what it may be made of cannot be resumed
exactly: a shuffle buffer comes back empty and is filled with other samples, whatever ``state_dict()`` says.

On failure: a release that renames something fails that test; a stage that is not known is let through.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def stages(dataset: Any) -> Iterator[Any]:
    """Every stage of a streaming dataset's pipeline, the last applied first."""
    todo = [dataset._ex_iterable]
    while todo:
        stage = todo.pop()
        yield stage
        inner = [getattr(stage, "ex_iterable", None), *(getattr(stage, "ex_iterables", None) or ())]
        todo.extend(each for each in inner if each is not None)


def not_exact(dataset: Any) -> str | None:
    """Why a streaming dataset cannot be cut into shards and resumed exactly, with the remedy; None if it can."""
    if dataset._distributed is not None:
        return "the dataset is already split by node: give the whole one, every rank reads its own shards of it"
    if dataset._formatting is not None and dataset._formatting.is_table:
        return (
            f"the dataset yields {dataset._formatting.format_type} tables, whose samples cannot be told apart:"
            ' use .with_format("torch"), "numpy" or None'
        )
    for stage in stages(dataset):
        name = type(stage).__name__
        if name == "BufferShuffledExamplesIterable":
            return (
                f"the dataset has a shuffle buffer of {stage.buffer_size} samples, which a resumed run cannot fill with"
                " the same samples again: leave out .shuffle(), the stream shuffles the order of files by seed and pass"
                " (shuffle rows when the files are written)"
            )
        if name in ("SkipExamplesIterable", "TakeExamplesIterable") and stage.num_shards > 1:
            word = name.removesuffix("ExamplesIterable").lower()
            return (
                f"the dataset is cut by .{word}({stage.n}), which means other samples once it is read in shards:"
                " split by files, or by .filter()"
            )
    return None
