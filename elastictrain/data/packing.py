"""Packing: documents joined, one after the other, into samples of one length.

The cursor of a packed sample is ``[document, offset]``: the cursor of the document that the next token is in, and how
many of its tokens are used. Nothing is buffered, so reading on means tokenizing one document again.

What is left at the end of a shard's pass, less than one sample, is dropped: a sample never holds tokens of two passes.

On failure: what ``tokenize`` raises comes through; something else than a row of integers is a
:class:`~elastictrain.errors.UsageError` at the first document.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from elastictrain.data.sources import Cursor, Source
from elastictrain.errors import UsageError

Tokens = npt.NDArray[np.integer[Any]]


class PackedSource(Source):
    """Fixed-length rows of tokens, int64 tensors of shape ``[length]``.

    Args:
        documents: where they come from.
        transform: is applied to each document first.
        tokenize: a document to its token ids. The same document must always give the same ids.
        eos: is put behind each document; None puts nothing.
    """

    def __init__(
        self,
        documents: Source,
        length: int,
        *,
        tokenize: Callable[[Any], Any],
        transform: Callable[[Any], Any] | None = None,
        eos: int | None = None,
    ) -> None:
        if length < 1:
            raise UsageError(f"packed length={length} must be at least 1")
        self._documents = documents
        self._length = length
        self._tokenize = tokenize
        self._transform = transform
        self._eos = eos
        self.max_shards = documents.max_shards
        self.shard_remedy = documents.shard_remedy
        self.draws_random = True

    def describe(self) -> dict[str, Any]:
        return {**self._documents.describe(), "packed": self._length, "eos": self._eos}

    def read(
        self, shard: int, num_shards: int, *, order: int | None, cursor: Cursor = None
    ) -> Iterator[tuple[Any, Cursor]]:
        here, offset = cursor or (None, 0)
        row, filled = np.empty(self._length, np.int64), 0
        for document, behind in self._documents.read(shard, num_shards, order=order, cursor=here):
            tokens = self._tokens(document)
            while offset < len(tokens):
                taken = min(len(tokens) - offset, self._length - filled)
                row[filled : filled + taken] = tokens[offset : offset + taken]
                filled, offset = filled + taken, offset + taken
                if filled == self._length:
                    yield torch.from_numpy(row), [behind, 0] if offset == len(tokens) else [here, offset]
                    row, filled = np.empty(self._length, np.int64), 0
            here, offset = behind, 0

    def _tokens(self, document: Any) -> Tokens:
        tokens = self._tokenize(document if self._transform is None else self._transform(document))
        if isinstance(tokens, Mapping) and "input_ids" in tokens:  # what transformers' tokenizers return
            tokens = tokens["input_ids"]
        ids = np.frombuffer(tokens, np.uint8) if isinstance(tokens, (bytes, bytearray)) else np.asarray(tokens)
        if ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
            raise UsageError(
                f"tokenize returned {type(tokens).__name__} of {ids.dtype} and shape {list(ids.shape)}:"
                " it must return one row of integers, or bytes"
            )
        if self._eos is not None:
            ids = np.append(ids.astype(np.int64), self._eos)
        return ids
