"""The planner's arithmetic: every layout is weighed, the choice follows its rules, and nothing is measured in vain."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Never

import pytest
import torch

from elastictrain.config import MeshShape
from elastictrain.parallel.memory import Model, Part, Saved, Weight, chunk, memory, stages
from elastictrain.parallel.planner import Devices, choose, plan, size

MiB = 1 << 20


def block(numel: int = 1024, width: int = 256, saved: int = 0) -> Part:
    """A unit of ``numel`` × ``width`` fp32 numbers, cut by tensor parallelism, under Adam."""
    weight = Weight((numel, width), state=2 * 4 * numel * width, fixed=4, tp_dim=0)
    return Part((weight,), is_unit=True, saved=Saved(cut=saved, largest=saved // 4, largest_is_cut=True))


def model(num_units: int = 8, *, saved: int = 0, **options: object) -> Model:
    ends = Part((Weight((1024, 256), state=2 * MiB),))
    parts = (ends, *(block(saved=saved) for _ in range(num_units)), ends)
    return Model(parts, **{"knows_activations": True, "must_divide": {"heads": 8}, **options})  # type: ignore[arg-type]


def without(one: Model, *axes: str) -> Model:
    return replace(one, refused=dict.fromkeys(axes, "not this one"))


DATA_ALONE = ("pp", "cp", "tp")


def test_every_layout_is_weighed_once() -> None:
    made = plan(model(), Devices(16, 4, 100 * MiB))
    shapes = [layout.shape for layout in made.layouts]
    expected = {sizes for sizes in itertools.product((1, 2, 4, 8, 16), repeat=5) if math.prod(sizes) == 16}
    expected = {sizes for sizes in expected if sizes[0] <= 10}  # ten parts with weights
    assert len(shapes) == len(set(shapes)) == len(expected)
    assert {shape.sizes for shape in shapes} == expected
    assert all(layout.fits == (layout.problem is None and layout.memory.total <= made.room) for layout in made.layouts)


def test_a_small_state_is_replicated_and_nothing_is_measured() -> None:
    def measure() -> Never:
        raise AssertionError

    shape, why = choose(Devices(4, 4, 100 * MiB), parameter_bytes=5 * MiB, measure=measure)
    assert shape == MeshShape(dp_replicate=4)
    assert why == "every rank keeps the whole state: it needs 25 MiB of a device's 100 MiB"
    with pytest.raises(AssertionError):
        choose(Devices(4, 4, 100 * MiB), parameter_bytes=5 * MiB + 1, measure=measure)
    assert choose(Devices(1, 1, 1), parameter_bytes=9, measure=measure) == (MeshShape(), "one rank")


def test_plan_and_start_choose_the_same() -> None:
    for num_ranks, num_bytes in itertools.product((1, 2, 4, 6, 8), (8 * MiB, 30 * MiB, 60 * MiB, 100 * MiB, 900 * MiB)):
        devices, one = Devices(num_ranks, num_ranks, num_bytes), model()
        chosen = plan(one, devices).chosen.shape
        assert choose(devices, parameter_bytes=one.parameter_bytes, measure=lambda: one)[0] == chosen  # noqa: B023


def test_the_least_sharding_that_fits() -> None:
    # 10 MiB of parameters: 40 MiB of state, and 10 MiB of gradients on their way where all is replicated
    for room, expected in ((51, "dp_replicate=8"), (30, "dp_replicate=4, dp_shard=2"), (17, "dp_shard=8")):
        made = plan(without(model(), *DATA_ALONE), Devices(8, 8, int(room / 0.9 * MiB)))
        assert (str(made.chosen.shape), made.chosen.fits) == (expected, True)


def test_tensor_then_pipeline_where_sharding_is_not_enough() -> None:
    big = model(saved=8 * MiB)  # 64 MiB of activations, which sharding does not share out
    node = Devices(8, 4, 70 * MiB)
    assert plan(without(big, "cp"), node).chosen.shape.tp == 2, "the smallest that fits"
    assert not plan(without(big, "tp", "cp"), node).chosen.fits, "1F1B keeps as many activations on its first stage"
    assert not plan(without(big, *DATA_ALONE), node).chosen.fits
    one = plan(without(replace(big, must_divide={"heads": 3}), "cp"), node)
    assert one.chosen.shape.tp == 1
    assert {layout.problem for layout in one.layouts if (layout.shape.tp, layout.shape.cp) == (2, 1)} == {
        "tp=2 does not divide heads=3"
    }


def test_a_pipeline_where_nothing_else_is_possible() -> None:
    made = plan(without(model(), "dp_shard", "cp", "tp"), Devices(4, 4, 36 * MiB))
    assert made.chosen.fits
    assert made.chosen.shape == MeshShape(pp=2, dp_replicate=2)


def test_tensor_parallelism_stays_within_a_node() -> None:
    made = plan(model(), Devices(24, 6, 100 * MiB))
    problems = {layout.shape.tp: layout.problem for layout in made.layouts}
    assert problems[4] == "tp=4 is not within a node of 6"
    assert problems[3] == "tp=3 does not divide heads=8"
    assert any(layout.problem is None for layout in made.layouts if layout.shape.tp == 2)


def test_context_parallelism_where_it_fits() -> None:
    long = Part((), saved=Saved(whole=64 * MiB, largest=MiB, attended=4 * MiB))
    one = without(model(), "pp", "tp")
    one = replace(one, parts=(*one.parts, long), num_tokens=48)
    made = plan(one, Devices(4, 4, 85 * MiB))
    assert made.chosen.shape == MeshShape(dp_replicate=2, cp=2)
    assert {layout.problem for layout in plan(model(), Devices(4, 4, MiB)).layouts if layout.shape.pp == 2} == {
        None,
        "cp and pp do not go together",
    }
    odd = plan(replace(one, num_tokens=50), Devices(4, 4, 85 * MiB))
    problems = {layout.shape.cp: layout.problem for layout in odd.layouts if layout.shape.pp == layout.shape.tp == 1}
    assert problems[2] == "twice cp=2 does not divide the 50 tokens of a sequence"
    shared, alone = (memory(one, MeshShape(dp_shard=4 // cp, cp=cp)) for cp in (4, 1))
    assert (shared.parameters, shared.optimizer) == (alone.parameters, alone.optimizer), "they share the state too"
    assert shared.activations == 16 * MiB + 3 * MiB + 3 * 4 * MiB + MiB // 2


def test_every_rank_gets_a_microbatch_if_it_can() -> None:
    few = model(num_slots=4)
    assert plan(without(few, "cp"), Devices(8, 8, 100 * MiB)).chosen.shape == MeshShape(dp_replicate=4, tp=2)
    only = plan(without(few, *DATA_ALONE), Devices(8, 8, 100 * MiB)).chosen
    assert (only.shape, only.idle) == (MeshShape(dp_replicate=8), 4)
    for layout in plan(few, Devices(8, 8, 100 * MiB)).layouts:
        if layout.problem is None:
            assert layout.shape.pp <= max(1, 4 // layout.shape.dp), "a stage without a microbatch"


def test_another_number_of_ranks_is_planned_again() -> None:
    one = model()
    chosen = [plan(without(one, "cp"), Devices(n, 8, 34 * MiB)).chosen.shape for n in (8, 6, 4, 2, 8)]
    assert [(shape.dp_replicate, shape.dp_shard) for shape in chosen] == [(4, 2), (3, 2), (2, 2), (1, 2), (4, 2)]


def test_without_activations_half_of_a_device_is_left_to_them() -> None:
    blind = replace(model(), knows_activations=False)
    made = plan(blind, Devices(4, 4, 90 * MiB))
    assert made.room == 45 * MiB
    assert made.chosen.shape.dp_shard == 2
    assert made.why.endswith(", activations not counted")
    assert plan(model(), Devices(4, 4, 90 * MiB)).chosen.shape.dp_shard == 1


def test_what_is_kept_in_a_pipeline() -> None:
    one = model(saved=MiB)
    for pp in (2, 4):
        held = [memory(one, MeshShape(pp=pp), stage=stage) for stage in range(pp)]
        units = [sum(1 for i in span if one.parts[i].is_unit) for span in stages(one, pp)]
        expected = [(pp - stage) * units[stage] * MiB + MiB // 2 * bool(units[stage]) for stage in range(pp)]
        assert [memory_.activations for memory_ in held] == expected
        assert sum(memory_.parameters for memory_ in held) == one.parameter_bytes
    few = replace(one, num_slots=2)
    assert memory(few, MeshShape(pp=4)).activations < memory(one, MeshShape(pp=4)).activations


def test_messages_between_stages() -> None:
    """A buffer and a gradient of what is received, and a gradient of what is sent, for every microbatch."""
    one = replace(
        model(), parts=tuple(replace(part, sent=1000 + i) for i, part in enumerate(model().parts)), num_slots=6
    )
    spans = stages(one, 3)
    sent = [1000 + span.stop - 1 for span in spans]
    expected = [6 * sent[0], 6 * (2 * sent[0] + sent[1]), 6 * 2 * sent[1]]
    assert [memory(one, MeshShape(pp=3), stage=stage).communication for stage in range(3)] == expected
    assert memory(one, MeshShape()).communication == 0


def test_the_fullest_stage_is_found_among_those_that_differ() -> None:
    talks = replace(model(), parts=tuple(replace(block(saved=MiB), sent=MiB) for _ in range(12)), num_slots=8)
    for one in (talks, model(saved=MiB), model(6, saved=3 * MiB, num_slots=3), model(12)):
        for layout in plan(one, Devices(8, 8, 50 * MiB)).layouts:
            every = [memory(one, layout.shape, stage=stage).total for stage in range(layout.shape.pp)]
            assert layout.memory.total == max(every)


def test_a_tied_weight_is_on_both_its_stages() -> None:
    embedding = Weight((100, 10))
    parts = (Part((embedding,)), Part((Weight((100, 10)),), is_unit=True), Part((Weight((1,)),), tied=(embedding,)))
    one = Model(parts)
    assert memory(one, MeshShape()).parameters == 8004
    assert [memory(one, MeshShape(pp=2), stage=s).parameters for s in (0, 1)] == [4000, 8004]


def test_chunks_are_torchs() -> None:
    for whole, num in itertools.product(range(1, 20), range(1, 8)):
        theirs = [len(piece) for piece in torch.arange(whole).chunk(num)]
        ours = [chunk(whole, num, index) for index in range(num)]
        assert ours == theirs + [0] * (num - len(theirs))


def test_stages_are_as_even_as_they_can_be() -> None:
    for sizes in ([5, 1, 1, 1, 5], [1] * 7, [9, 1, 1], [1, 2, 3, 4, 5, 6]):
        one = Model(tuple(Part((Weight((number,)),), is_unit=True) for number in sizes))
        for pp in range(1, len(sizes) + 1):
            spans = stages(one, pp)
            assert [i for span in spans for i in span] == list(range(len(sizes)))
            assert len(spans) == pp and all(spans)
            cuts = itertools.combinations(range(1, len(sizes)), pp - 1)
            best = min(max(sum(sizes[a:b]) for a, b in itertools.pairwise((0, *cut, len(sizes)))) for cut in cuts)
            assert max(sum(sizes[i] for i in span) for span in spans) == best


def test_sizes_in_words() -> None:
    assert [size(n) for n in (17, 2048, 3.5 * MiB, 42.6 * MiB, 5 << 30)] == [
        "17 B",
        "2 KiB",
        "3.5 MiB",
        "43 MiB",
        "5 GiB",
    ]
