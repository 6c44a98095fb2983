import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from zsim.strategy.optimizer_rule import SGD, Adam, ClipNorm, rate_of
from zsim_torch.execute.sharded_optimizer import (
    BLOCK,
    LANES,
    Updated,
    clip,
    is_finite,
    sum_of_squares,
    unscale,
    update,
)

SIZE = 7


@settings(deadline=None)  # the first call loads what torch needs
@given(
    st.builds(
        Adam,
        learning_rate=st.floats(1e-5, 0.1),
        beta1=st.floats(0.0, 0.99),
        beta2=st.floats(0.5, 0.999),
        epsilon=st.floats(1e-8, 1e-3),
        weight_decay=st.sampled_from([0.0, 0.1]),
    ),
    st.integers(0, 1000),
)
def test_adam_is_pytorchs(rule: Adam, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(SIZE, dtype=torch.float64, generator=generator)
    parameter = torch.nn.Parameter(start.clone())
    theirs = torch.optim.AdamW(
        [parameter],
        lr=rate_of(rule, {}),
        betas=(rule.beta1, rule.beta2),
        eps=rule.epsilon,
        weight_decay=rule.weight_decay,
    )
    ours = start.clone()
    moments = (torch.zeros_like(ours), torch.zeros_like(ours))
    plain, states = ours.clone(), tuple(each.clone() for each in moments)
    for step in range(1, 5):
        gradient = torch.randn(SIZE, dtype=torch.float64, generator=generator)
        parameter.grad = gradient.clone()
        theirs.step()
        operands = Updated(gradient=gradient, trained=ours, moments=moments)
        update(rule, operands, {"step": step})
        rule.update(gradient, plain, states, rate=rate_of(rule, {}), step=step)
    assert torch.allclose(plain, parameter, rtol=1e-12, atol=1e-14)
    assert torch.allclose(ours, parameter, rtol=1e-12, atol=1e-14)


@given(
    st.builds(
        SGD,
        learning_rate=st.floats(1e-5, 0.1),
        momentum=st.floats(0.0, 0.99),
        weight_decay=st.sampled_from([0.0, 0.1]),
    ),
    st.booleans(),
    st.integers(0, 1000),
)
def test_sgd_is_pytorchs(rule: SGD, nesterov: bool, seed: int) -> None:
    rule = replace(rule, nesterov=nesterov and rule.momentum > 0)
    generator = torch.Generator().manual_seed(seed)
    ours = torch.randn(SIZE, dtype=torch.float64, generator=generator)
    parameter = torch.nn.Parameter(ours.clone())
    theirs = torch.optim.SGD(
        [parameter],
        lr=rate_of(rule, {}),
        momentum=rule.momentum,
        weight_decay=rule.weight_decay,
        nesterov=rule.nesterov,
    )
    moments = tuple(torch.zeros_like(ours) for _ in range(rule.moments))
    for _ in range(4):
        gradient = torch.randn(SIZE, dtype=torch.float64, generator=generator)
        parameter.grad = gradient.clone()
        theirs.step()
        update(rule, Updated(gradient=gradient, trained=ours, moments=moments), {})
    assert torch.allclose(ours, parameter, rtol=1e-12, atol=1e-14)


def test_sgd_goes_down_the_gradient_in_the_format_of_what_it_trains() -> None:
    trained = torch.ones(2, dtype=torch.float64)
    gradient = torch.tensor([1.0, -2.0], dtype=torch.bfloat16)
    update(SGD(learning_rate=0.5), Updated(gradient=gradient, trained=trained, moments=()), {})
    assert trained.tolist() == [0.5, 2.0]


def test_clipping_is_no_optimizer() -> None:
    operands = Updated(gradient=torch.ones(1), trained=torch.ones(1), moments=())
    with pytest.raises(ValueError, match="no optimizer"):
        update(ClipNorm(maximum=1.0), operands, {})
    with pytest.raises(ValueError, match="does not clip"):
        clip(SGD(), torch.ones(1), [torch.ones(1)], 1.0)


def test_the_norm_adds_up_in_the_format_of_its_target() -> None:
    target = torch.empty(1)
    gradients = [torch.full((10_000,), 10.0, dtype=torch.float16), torch.empty(0)]
    sum_of_squares(gradients, target)
    assert target.item() == pytest.approx(1e6)  # more than fp16 can hold


@pytest.mark.parametrize(("value", "bad"), [(1.0, 0.0), (math.inf, 1.0), (math.nan, 1.0)])
def test_one_element_that_is_not_finite_is_found(value: float, bad: float) -> None:
    target = torch.full((1,), math.nan)
    is_finite([torch.zeros(3), torch.tensor([0.0, value]), torch.empty(0)], target)
    assert target.item() == bad


@pytest.mark.parametrize("maximum", [1.0, 100.0])
def test_clipping_is_pytorchs_also_of_scaled_gradients(maximum: float) -> None:
    parameter = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    parameter.grad = torch.tensor([3.0, 4.0], dtype=torch.float64)
    scaled = parameter.grad * 8
    squares = torch.zeros(1, dtype=torch.float64)
    sum_of_squares([scaled], squares)
    unscale([scaled], 8)
    clip(ClipNorm(maximum=maximum), squares, [scaled], 8)
    torch.nn.utils.clip_grad_norm_([parameter], maximum)
    assert torch.allclose(scaled, parameter.grad, rtol=1e-12)


RULES = (
    Adam(learning_rate=0.01, weight_decay=0.1),
    SGD(learning_rate=0.1, momentum=0.9, weight_decay=0.1),
    SGD(learning_rate=0.1, momentum=0.9, nesterov=True),
)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@settings(deadline=None)
@given(
    st.sampled_from(RULES),
    st.sampled_from(DTYPES),
    st.sampled_from(DTYPES),
    st.integers(1, 3 * LANES),
    st.lists(st.integers(0, 3 * LANES), max_size=3),
    st.integers(0, 5),
)
def test_how_a_shard_is_cut_and_where_it_lies_changes_no_bit_of_an_update(
    rule: Adam | SGD,
    dtype: torch.dtype,
    gradients: torch.dtype,
    count: int,
    cuts: list[int],
    offset: int,
) -> None:
    assume(isinstance(rule, Adam) or dtype.itemsize >= 4)

    def updated(ends: list[int]) -> tuple[torch.Tensor, ...]:
        drawn = torch.Generator().manual_seed(count)
        states = [
            torch.rand(count + offset, generator=drawn).to(dtype)[offset:]
            for _ in range(1 + rule.moments)
        ]
        gradient = torch.randn(count, generator=drawn).to(gradients)
        for low, high in pairwise([0, *ends, count]):
            trained, *moments = (each[low:high] for each in states)
            operands = Updated(gradient=gradient[low:high], trained=trained, moments=tuple(moments))
            update(rule, operands, {"step": 3.0})
        return tuple(states)

    whole = updated([])
    for one, other in zip(whole, updated(sorted(min(cut, count) for cut in cuts)), strict=True):
        assert torch.equal(one, other)


def test_blocks_of_an_update_end_where_no_bit_shows() -> None:
    count = 2 * BLOCK + 1000
    rule = RULES[0]

    def updated(ends: list[int]) -> list[torch.Tensor]:
        drawn = torch.Generator().manual_seed(0)
        states = [torch.rand(count, generator=drawn) for _ in range(3)]
        gradient = torch.randn(count, generator=drawn).bfloat16()
        for low, high in pairwise([0, *ends, count]):
            trained, *moments = (each[low:high] for each in states)
            operands = Updated(gradient=gradient[low:high], trained=trained, moments=tuple(moments))
            update(rule, operands, {"step": 1.0})
        return states

    for one, other in zip(updated([]), updated([BLOCK // 2 + 7, BLOCK + 1]), strict=True):
        assert torch.equal(one, other)


@pytest.mark.one_commit_in(9)
def test_a_norm_is_the_nearest_number_however_its_operands_are_cut() -> None:
    values = torch.randn(200_001, generator=torch.Generator().manual_seed(0))
    exact = math.fsum(float(each) ** 2 for each in values)
    for size in (1000, 77_777, 200_001):
        target = torch.empty(1)
        parts = [values[start : start + size] for start in range(0, len(values), size)]
        sum_of_squares(parts, target)
        assert target.item() == torch.tensor(exact, dtype=torch.float32).item()
