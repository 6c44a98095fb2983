"""Shards of experts in FSDP2: along the experts with padding, or along the rows of each expert."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zsim.model.architecture import Llama
from zsim.model.experts import Experts
from zsim.model.model import Model, ModelError, Parameter
from zsim.model.transformer import transformer
from zsim.proof import check
from zsim.runtimes.registry import make_schedule
from zsim.schedule.operation import Copy, walk
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import Train
from zsim_runtimes.fsdp2.options import FSDP2
from zsim_runtimes.fsdp2.placement import ShardPlacement, padded_elements

SHAPE = Llama(
    layers=2,
    hidden_size=16,
    attention_heads=2,
    sequence_length=16,
    vocab_size=32,
    experts=Experts(count=2, top_k=1, intermediate_size=16),
)


def strategy(ranks: int, placement: ShardPlacement) -> Strategy:
    return Strategy(
        parallel=Parallel(data=ranks),
        zero=Zero(stage=3, emulate=FSDP2(shard_placement_fn=placement)),
        train=Train(precision=Precision.BF16, gradient_accumulation_steps=2),
    )


def model(shape: Llama = SHAPE) -> Model:
    return transformer(shape, micro_batch_size=1, precision=Precision.BF16)


def experts_of(ranks: int, placement: ShardPlacement) -> int:
    """Return the elements of experts' weights that a rank keeps in fp32."""
    schedule = make_schedule(model(), strategy(ranks, placement))
    names = {each.name for each in model().parameters if each.expert}
    (program,) = schedule.programs
    found = 0
    for name in program.persistent:
        buffer = program.by_name[name]
        if not name.endswith("/parameter") or buffer.layout is None:
            continue
        layout = schedule.layout_by_name[buffer.layout]
        ends = [*(each.start for each in layout.pieces[1:]), layout.elements]
        for piece, end in zip(layout.pieces, ends, strict=True):
            if piece.parameter in names:
                found += (end - piece.start) // ranks
    return found


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_rank_keeps_its_part_of_the_experts_of_torchtitan_and_more_with_the_default_of_torch(
    ranks: int,
) -> None:
    whole = sum(each.elements for each in model().parameters if each.expert)
    assert experts_of(ranks, ShardPlacement.EXPERTS) == whole // ranks
    assert experts_of(ranks, ShardPlacement.FIRST) == whole // 2  # one of two experts, or padding


@pytest.mark.parametrize("placement", ShardPlacement)
def test_steps_with_either_placement_are_proved(placement: ShardPlacement) -> None:
    built = model()
    assert check(make_schedule(built, strategy(4, placement)), built) == ()


def copies(placement: ShardPlacement, name: str) -> list[Copy]:
    """Return the copies of a step whose names contain `name`."""
    (program,) = make_schedule(model(), strategy(4, placement)).programs
    return [each for each in walk(program.step) if isinstance(each, Copy) and name in each.id]


@pytest.mark.parametrize(
    ("name", "of"), [("chunk_cat", "copy_out/bucket{}"), ("/chunk/", "set/bucket{}/input_gradient")]
)
def test_parts_along_the_second_dimension_are_copied_once_more(name: str, of: str) -> None:
    assert not copies(ShardPlacement.FIRST, name)
    again = copies(ShardPlacement.EXPERTS, name)
    plain = [
        each for number in (1, 2) for each in copies(ShardPlacement.EXPERTS, of.format(number))
    ]
    assert len(again) == len(plain) > 0  # each gather and reduction of a block
    assert {each.launches for each in again} == {2}  # gate_up and down


def test_rows_that_ranks_do_not_divide_are_refused() -> None:
    experts = replace(SHAPE.experts, intermediate_size=10) if SHAPE.experts else None
    built = model(replace(SHAPE, experts=experts))
    with pytest.raises(ModelError, match=r"shard_placement_fn: 8 ranks must divide the \d+ rows"):
        make_schedule(built, strategy(8, ShardPlacement.EXPERTS))


@given(st.integers(1, 64), st.integers(1, 40), st.sampled_from(ShardPlacement))
def test_parameters_of_dense_layers_are_padded_to_the_next_multiple(
    ranks: int, rows: int, placement: ShardPlacement
) -> None:
    found = padded_elements(Parameter(name="weight", shape=(rows, 3)), ranks, placement)
    assert found % (3 * ranks) == 0
    assert 3 * rows <= found < 3 * (rows + ranks)
