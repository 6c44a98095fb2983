"""Checkpoints and evaluation along tensor and pipeline axes, and from one set of axes to another.

Pieces are put together to whole tensors, by the names and shapes of the model, so that any axes
read what others wrote; padding of the vocabulary is in no checkpoint.
"""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from resumed_axes import AxesEnded, AxesPart, run_parts
from saved_tensors import assert_same_checkpoint
from shared_ranks import SharedPools
from torch import nn
from trained_axes import (
    CUT,
    FSDP2_OF_TOKENS,
    MEGATRON,
    NANOTRON,
    OF_TOKENS,
    PLAIN,
    SMALL_GPT,
    SMALL_LLAMA,
    TIED_GPT,
    AxesCase,
    on,
    whole,
)

from zsim.backend.backend import RefusedError
from zsim.model.architecture import GPT
from zsim_torch.checkpoint.parameter_part import ParameterPart, need_parts
from zsim_torch.module.tensor_part import TensorPlace
from zsim_torch.module.transformer import transformer

TWO_RANKS = {
    "nanotron, tensor 2, tokens cut": AxesCase(
        SMALL_LLAMA, on(NANOTRON, tensor=2, emulate=CUT, stage=1, clip_norm=0.1)
    ),
    "nanotron, 2 stages": AxesCase(SMALL_LLAMA, on(NANOTRON, pipeline=2)),
    "stage 3, tensor 2": AxesCase(SMALL_LLAMA, on(PLAIN, tensor=2, stage=3, bucket_elements=200)),
    "stage 2, tensor 2, tied": AxesCase(TIED_GPT, on(OF_TOKENS, tensor=2, stage=2, clip_norm=0.1)),
    "Megatron-LM, tensor 2": AxesCase(SMALL_GPT, on(MEGATRON, tensor=2)),
    "FSDP2, tensor 2": AxesCase(SMALL_LLAMA, on(FSDP2_OF_TOKENS, tensor=2)),
}
MOVES = (
    on(NANOTRON, data=2, pipeline=2, stage=1),
    on(NANOTRON, tensor=2, pipeline=2, emulate=CUT),
    on(NANOTRON, data=2, tensor=2, stage=1),
    on(NANOTRON, pipeline=4),
    on(PLAIN.but({"train.precision": NANOTRON.train.precision}), data=2, tensor=2, stage=3),
)
"""Each goes on from a checkpoint of two stages, and the next from its own."""


def assert_equal(one: AxesEnded, other: AxesEnded) -> None:
    assert one.parameters.keys() == other.parameters.keys()
    for name, value in one.parameters.items():
        assert torch.equal(value, other.parameters[name]), name


@pytest.mark.matrix(24)
@pytest.mark.parametrize("name", TWO_RANKS)
def test_two_steps_and_two_more_from_a_checkpoint_are_four_bit_for_bit(
    pool_of: SharedPools, tmp_path: Path, name: str
) -> None:
    half = AxesPart(TWO_RANKS[name], stop=2, saved=tmp_path / name)
    asked = [replace(half, stop=4, saved=None), half, half.then(4)]
    for complete, first, rest in pool_of(2).run(run_parts, asked):
        assert first.losses + rest.losses == complete.losses
        assert rest.evaluated == complete.evaluated < first.evaluated
        assert rest.steps_done == 4
        assert_equal(rest, complete)


@pytest.mark.matrix(24)
@pytest.mark.parametrize("number", range(len(MOVES)))
def test_a_training_moves_from_axes_to_others_and_back(
    pool_of: SharedPools, tmp_path: Path, number: int
) -> None:
    first = AxesPart(AxesCase(SMALL_LLAMA, on(NANOTRON, pipeline=2)), stop=2, saved=tmp_path / "0")
    to = [MOVES[number], MOVES[(number + 1) % len(MOVES)]]
    moved = [
        AxesPart(
            AxesCase(SMALL_LLAMA, strategy),
            start=2,
            stop=2,
            loaded=tmp_path / f"{place - 1}",
            saved=tmp_path / f"{place}",
        )
        for place, strategy in enumerate(to, 1)
    ]
    ended = pool_of(2).run(run_parts, [first])[0][0]
    by_rank = pool_of(4).run(run_parts, moved)
    folders = [part.saved for part in (first, *moved) if part.saved is not None]
    for one, other in pairwise(folders):
        assert_same_checkpoint(one, other, parameters=len(ended.parameters))
    expected = {name: value.flatten() for name, value in ended.parameters.items()}
    for place, part in enumerate(moved):
        results = [ended_there[place] for ended_there in by_rank]
        assert {each.steps_done for each in results} == {2}
        assert {each.evaluated for each in results} == {results[0].evaluated}
        parameters = whole(part.case, results)
        assert parameters.keys() == expected.keys()
        for name, value in parameters.items():
            assert torch.equal(value.flatten().float(), expected[name]), name


@pytest.mark.matrix(9)
@pytest.mark.parametrize("name", TWO_RANKS)
def test_every_axis_evaluates_as_one_process(pool_of: SharedPools, name: str) -> None:
    part = AxesPart(TWO_RANKS[name])
    (alone,) = run_parts([replace(part, case=replace(part.case, strategy=on(part.case.strategy)))])
    for (result,) in pool_of(2).run(run_parts, [part]):
        assert result.evaluated == pytest.approx(alone.evaluated, rel=1e-6)


def test_a_module_that_does_not_say_how_it_was_cut_is_not_saved() -> None:
    schedule = TWO_RANKS["Megatron-LM, tensor 2"].job().schedule
    with pytest.raises(RefusedError, match=r"have parts of \S+, and the module does not say which"):
        need_parts(schedule, nn.Identity())
    need_parts(TWO_RANKS["nanotron, 2 stages"].job().schedule, nn.Identity())


@given(
    ranks=st.sampled_from((1, 2, 4)),
    vocabulary=st.integers(3, 14),
    data=st.data(),
    joined=st.booleans(),
)
def test_boxes_of_parts_put_the_whole_of_each_parameter_together(
    ranks: int, vocabulary: int, data: st.DataObject, joined: bool
) -> None:
    shape = GPT(
        layers=1,
        hidden_size=8,
        attention_heads=4,
        sequence_length=4,
        vocab_size=vocabulary,
        joined_qkv=joined,
    )
    sizes = {name: each.shape for name, each in transformer(shape, seed=None).named_parameters()}
    name = data.draw(st.sampled_from(sorted(sizes)))
    numbers = torch.arange(1.0, sizes[name].numel() + 1).view(sizes[name])
    found = torch.zeros_like(numbers)
    for number in range(ranks):
        place = TensorPlace(number, ranks)
        own = place.part(shape, name, numbers)
        cuts = place.boxes(shape, name, numbers.shape)
        assert place.whole_shape(shape, name, own.shape) == numbers.shape
        part = ParameterPart(tuple(own.shape), tuple(numbers.shape), cuts)
        middle = data.draw(st.integers(0, own.numel()))
        for first, size in ((0, middle), (middle, own.numel() - middle)):
            flat = own.flatten()[first : first + size]
            for box in part.boxes(first, size):
                ends = zip(box.offsets, box.sizes, strict=True)
                place_of_box = tuple(slice(offset, offset + size) for offset, size in ends)
                value = flat[box.start : box.start + box.elements].view(box.sizes)
                found[place_of_box] = value
    assert torch.equal(found, numbers)
