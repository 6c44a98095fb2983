"""A module on "meta" gives the model that is written down for it."""

import pytest
import torch
from drawn_examples import examples
from drawn_shapes import architectures
from hypothesis import given
from hypothesis import strategies as st

from zsim.model.architecture import Architecture
from zsim.model.transformer import transformer as described
from zsim.strategy.precision import Precision
from zsim_torch import model_from
from zsim_torch.module.transformer import transformer


@pytest.mark.one_commit_in(9)
@given(architectures(), st.integers(1, 3), st.sampled_from(Precision))
@examples(40)
def test_a_transformer_has_the_units_flops_and_activations_that_are_written_down(
    shape: Architecture, size: int, precision: Precision
) -> None:
    expected = described(shape, micro_batch_size=size, precision=precision)
    batch = torch.zeros(size, shape.sequence_length + 1, dtype=torch.int64)
    module = transformer(shape, seed=None)
    found = model_from(module, (batch,), units=module.units, precision=precision)
    assert found.forward_flops == expected.forward_flops
    again = sum(
        kernel.flops
        for unit in expected.units
        for kernel in unit.segments[0].backward
        if kernel.causal and not kernel.backward
    )
    assert found.backward_flops == expected.backward_flops + again
    assert {each.name: each.elements for each in found.parameters} == {
        each.name: each.elements for each in expected.parameters
    }
    assert (found.batch, found.loss.elements) == (expected.batch, 1)
    for one, other in zip(found.units, expected.units, strict=True):
        (mine,), (theirs,) = one.segments, other.segments
        assert one.name == other.name
        assert {each.name for each in one.parameters} == {each.name for each in other.parameters}
        assert mine.saved_bytes == theirs.saved_bytes, one.name
        assert mine.saves_input == theirs.saves_input
        flops = [
            sum(kernel.flops for kernel in each.backward if kernel.kind.multiplies_matrices)
            for each in (mine, theirs)
        ]
        assert flops[0] == flops[1], one.name
        assert mine.outputs[-1].size_bytes == theirs.outputs[-1].size_bytes
        assert len(mine.inputs) == len(theirs.inputs)
