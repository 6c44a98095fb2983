"""An update by Adam that is prepared once changes no bit, wherever a shard ends."""

from collections.abc import Callable

import pytest
import torch

from zsim.strategy.optimizer_rule import Adam
from zsim_torch.execute.sharded_optimizer import LANES, SteadyAdam, Updated, update

RULE = Adam(learning_rate=1e-2, weight_decay=0.1)


def shard(size: int, dtype: torch.dtype) -> Callable[[], Updated]:
    """Return what makes equal operands again and again."""
    generator = torch.Generator().manual_seed(size)
    drawn = torch.randn(2, size, generator=generator, dtype=dtype)

    def make() -> Updated:
        gradient, trained = drawn.clone()
        moments = torch.zeros(size, dtype=dtype), torch.zeros(size, dtype=dtype)
        return Updated(gradient=gradient, trained=trained, moments=moments)

    return make


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1, LANES - 1, LANES, LANES + 1, 9 * LANES + 7, (1 << 18) + 5])
def test_steps_of_a_prepared_update_have_the_bits_of_updates(size: int, dtype: torch.dtype) -> None:
    make = shard(size, dtype)
    one, other = make(), make()
    prepared = SteadyAdam(RULE, other)
    for step in (1.0, 2.0, 3.0):
        update(RULE, one, {"step": step})
        prepared.update(other.gradient, {"step": step})
        assert torch.equal(one.trained, other.trained)
        for here, there in zip(one.moments, other.moments, strict=True):
            assert torch.equal(here, there)


def test_a_gradient_in_another_format_is_left_to_the_update_itself() -> None:
    operands = shard(8, torch.float32)()
    assert SteadyAdam.serves(operands)
    narrow = Updated(
        gradient=operands.gradient.bfloat16(), trained=operands.trained, moments=operands.moments
    )
    assert not SteadyAdam.serves(narrow)
