"""Where models are cut: the row of units, the balance of stages, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from elastictrain.errors import UsageError
from elastictrain.parallel.parts import part_names
from elastictrain.parallel.units import cut_stages, find_units
from tests.parallel.piped import Cnn, Mlp, Transformer


def test_equal_blocks_with_what_stands_before_and_after() -> None:
    assert find_units(Transformer()) == ["embed", *(f"blocks.{i}" for i in range(8)), "norm", "head"]


def test_the_children_of_a_sequential_where_no_blocks_are() -> None:
    assert find_units(Mlp()) == ["embed", *(f"net.{i}" for i in range(15))]
    assert find_units(Cnn()) == ["embed", *(f"features.{i}" for i in range(19)), "head"]


def test_modules_within_modules() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop = nn.Dropout()  # no weights: it is code between units
            self.model = Transformer()
            self.probe = nn.BatchNorm1d(3, affine=False)

    names = find_units(Outer())
    assert names[:2] == ["model.embed", "model.blocks.0"] and names[-2:] == ["model.head", "probe"]


class Named(nn.Module):
    names: list[str]

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(2, 2)
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
        self.embed = nn.Linear(2, 2)

    def pipeline_units(self) -> list[str]:
        return self.names


def test_the_task_s_own_names_and_order() -> None:
    model = Named()
    model.names = ["embed", "layers.0", "layers.1", "layers.2", "head"]
    assert find_units(model) == model.names
    model.names = ["layers.0", "layers.2"]
    assert find_units(model) == ["head", "layers.0", "layers.1", "layers.2", "embed"]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["layers.7"], "names 'layers.7', which is no module of Named"),
        (["head", "head"], "names 'head' twice"),
        (["layers", "layers.1"], "names 'layers' and 'layers.1' inside of it"),
    ],
)
def test_names_that_cannot_be(names: list[str], message: str) -> None:
    model = Named()
    model.names = names
    with pytest.raises(UsageError, match=message):
        find_units(model)


def test_nothing_to_cut() -> None:
    with pytest.raises(UsageError, match="Linear has no run of equal blocks and no nn.Sequential"):
        cut_stages(nn.Linear(2, 2), num_stages=2, owners=(0, 1))
    assert part_names(nn.Linear(2, 2)) == []


def test_the_planner_weighs_what_a_pipeline_may_deal_out() -> None:
    assert part_names(Transformer()) == find_units(Transformer())
    assert part_names(Mlp()) == ["embed", *(f"net.{i}" for i in range(0, 15, 2))], "those with weights"


def _sizes(widths: list[int], num_stages: int) -> list[int]:
    """Parameters of each stage of layers that have ``widths`` of them."""
    layers = nn.Sequential(*(nn.ParameterList([torch.zeros(width)]) for width in widths))
    made = cut_stages(layers, num_stages=num_stages, owners=range(num_stages))
    assert [i for stage in made.stages for i in stage] == list(range(len(widths)))
    return [sum(widths[i] for i in stage) for stage in made.stages]


def test_stages_are_balanced_by_their_parameters() -> None:
    assert _sizes([1, 1, 1, 1], 2) == [2, 2]
    assert _sizes([10, 1, 1, 1, 1, 10], 3) == [10, 4, 10]
    assert _sizes([5, 1, 1, 1, 1, 1, 5], 3) == [5, 5, 5]
    assert _sizes([1, 1, 1, 9], 4) == [1, 1, 1, 9]
    assert max(_sizes([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], 4)) == 14  # the least that contiguous stages can have
    assert len(_sizes([100, 1, 1], 3)) == 3


def test_layers_without_weights_go_with_the_one_before() -> None:
    made = cut_stages(Mlp().net, num_stages=4, owners=range(4))
    assert all(type(Mlp().net[stage.start]) is nn.Linear for stage in made.stages)


def test_cut_points_of_the_user() -> None:
    made = cut_stages(Transformer(), num_stages=3, owners=range(3), starts=["blocks.1", "blocks.5"])
    assert [len(stage) for stage in made.stages] == [2, 4, 5]
    assert str(made).startswith("stage 0 (pp 0): embed to blocks.0; stage 1 (pp 1): blocks.1 to blocks.4;")
    for starts, message in (
        (["blocks.1", "block.5"], "names 'block.5', where the model cannot be cut: its units are embed, blocks.0"),
        (["blocks.5", "blocks.1"], r"pp_split blocks.5\+blocks.1: name units in the order of the model"),
        (["blocks.1"], "names 1 cut points, and pp makes 3 stages: name 2"),
    ):
        with pytest.raises(UsageError, match=message):
            cut_stages(Transformer(), num_stages=3, owners=range(3), starts=starts)


def test_more_stages_than_parts() -> None:
    with pytest.raises(UsageError, match=r"pp=6 needs 6 pipeline stages and Sequential has 3 parts with weights"):
        cut_stages(nn.Sequential(*(nn.Linear(2, 2) for _ in range(3))), num_stages=6, owners=range(6), what="pp=6")


def test_blocks_are_the_layers_not_what_is_inside_of_them() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(8))

    class Model(nn.Module):
        """Two of each: embeddings that are larger than all layers, lists, layers; a table that is never saved."""

        def __init__(self) -> None:
            super().__init__()
            self.words, self.places = nn.Embedding(1000, 2), nn.Embedding(1000, 2)
            self.before, self.layers = (nn.ModuleList(Layer() for _ in range(n)) for n in (1, 2))
            self.rotary = nn.Module()
            self.rotary.register_buffer("frequencies", torch.ones(2), persistent=False)
            self.head = nn.Linear(2, 2)

    assert find_units(Model()) == ["words", "places", "before", "layers.0", "layers.1", "head"]
