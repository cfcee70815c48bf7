"""Models that the library knows by no name, on meshes that nobody tuned for them."""

from __future__ import annotations

import pytest

from tests.parallel.fits import check, refusals
from tests.parallel.kinds import make

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.slow
def test_two_ranks() -> None:
    sharded = [(kind, "dp_shard=2") for kind in ("mlp", "cnn", "encoder-decoder", "mixture")]
    split = [(kind, "tp=2") for kind in ("decoder", "split-sequence", "two-optimizers", "mixture")]
    cut = [(kind, "pp=2") for kind in ("mlp", "cnn", "mixture")]
    check(
        2, [*sharded, *split, *cut, *(("in-order", f"pp=2,pp_split={unit}") for unit in ("target", "encoder.1"))], make
    )


@pytest.mark.slow
def test_four_ranks() -> None:
    """Whole weights on split activations, and weights that some ranks do not use, beside other axes."""
    summed = [("split-sequence", mesh) for mesh in ("dp_shard=2,tp=2", "pp=2,tp=2")]
    check(4, [*summed, *(("mixture", f"{axis}=2,dp_shard=2") for axis in ("dp_replicate", "pp"))], make)


def test_an_encoder_and_a_decoder_that_cannot_be_cut_there() -> None:
    said = refusals(2, [("encoder-decoder", "pp=2"), ("in-order", "pp=2,pp_split=decoder.1")], make)
    assert all("forward() calls target after encoder.2" in text for text in said["encoder-decoder", "pp=2"])
    past = "what head returns depends on a unit before decoder.0, whose output forward() uses again further on"
    assert all(past in text for text in said["in-order", "pp=2,pp_split=decoder.1"])
