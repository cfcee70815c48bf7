"""Private names of Hugging Face datasets that elastictrain.compat.datasets reads."""

from __future__ import annotations

import pytest

from elastictrain.compat.datasets import not_exact, stages

datasets = pytest.importorskip("datasets")


def test_the_stages_of_a_pipeline_are_found() -> None:
    stream = datasets.Dataset.from_dict({"a": list(range(8))}).to_iterable_dataset(num_shards=4)
    both = datasets.concatenate_datasets([stream.shuffle(seed=1, buffer_size=5).map(lambda row: row), stream.skip(1)])
    names = [type(stage).__name__ for stage in stages(both)]
    assert {"BufferShuffledExamplesIterable", "SkipExamplesIterable", "MappedExamplesIterable"} <= set(names)
    assert "TakeExamplesIterable" in [type(stage).__name__ for stage in stages(stream.take(1))]
    assert not_exact(stream) is None
    assert not_exact(stream.map(lambda row: row).with_format("torch")) is None
    assert stream._distributed is None
    assert stream.with_format("arrow")._formatting.is_table
