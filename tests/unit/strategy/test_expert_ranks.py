"""Degrees of experts: what they leave for others, and which do not fit."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zsim.config_error import ConfigError
from zsim.strategy.execution import ContextExchange
from zsim.strategy.expert_ranks import against_order
from zsim.strategy.offload import MemoryTier
from zsim.strategy.runtime_options import RuntimeOptions
from zsim.strategy.strategy import Strategy
from zsim_runtimes.fsdp1.options import FSDP1
from zsim_runtimes.fsdp2.options import FSDP2
from zsim_runtimes.megatron.options import Megatron

MEGATRON = Megatron(sequence_parallel=True)


def strategy_of(runtime: RuntimeOptions | None = None, **changes: object) -> Strategy:
    stage = 1 if runtime is None else runtime.stages[-1]
    named = {name.replace("__", "."): value for name, value in changes.items()}
    parallel = {key if "." in key else f"parallel.{key}": value for key, value in named.items()}
    return Strategy.of({"zero.stage": stage, "zero.emulate": runtime, **parallel})


def refusal(runtime: RuntimeOptions | None = None, **changes: object) -> str:
    with pytest.raises(ConfigError) as caught:
        strategy_of(runtime, **changes)
    return str(caught.value)


def test_the_same_experts_are_on_the_ranks_that_both_degrees_leave() -> None:
    strategy = strategy_of(MEGATRON, data=64, tensor=2, pipeline=4, expert=64, expert_tensor=1)
    assert strategy.expert_data == 2
    assert strategy.ranks == 64 * 2 * 4


def test_tensor_ranks_hold_parts_of_experts_by_default() -> None:
    strategy = strategy_of(MEGATRON, data=8, tensor=2, expert=4)
    assert (strategy.expert_tensor, strategy.expert_data) == (2, 2)
    assert not strategy_of(MEGATRON, data=8, tensor=2).has_expert_order


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"data": 8, "expert": 3},
            "parallel.expert: 3 x expert_tensor 1 must divide the 8 ranks of tensor x data; "
            "use 1, 2, 4 or 8",
        ),
        (
            {"data": 8, "expert": 16},
            "parallel.expert: 16 x expert_tensor 1 is more than the 8 ranks of tensor x data; "
            "use at most 8",
        ),
        (
            {
                "data": 6,
                "tensor": 2,
                "context": 3,
                "expert": 4,
                "expert_tensor": 1,
                "zero__sequence_parallel": True,
            },
            "parallel.expert: 4 and tensor x context = 6 must divide one another; "
            "use 1, 2, 6 or 12",
        ),
        (
            {"data": 8, "tensor": 2, "expert": 4},
            "parallel.expert: 4 needs sequence_parallel = true with several tensor ranks",
        ),
        (
            {"data": 8, "expert": 4, "zero__stage": 3, "zero__secondary": 4},
            "zero.secondary: 4 is not modelled with parallel.expert = 4",
        ),
        (
            {"data": 8, "expert": 4, "offload__optimizer": MemoryTier.HOST},
            "offload.optimizer: 'host' is not modelled with parallel.expert = 4",
        ),
    ],
)
def test_degrees_of_experts_that_do_not_fit_are_one_line(
    changes: dict[str, object], line: str
) -> None:
    assert refusal(None, **changes) == line


@pytest.mark.parametrize(
    ("runtime", "changes", "line"),
    [
        (
            MEGATRON,
            {"tensor": 8, "expert": 4, "expert_tensor": 1},
            "parallel.expert: 4 cuts the 8 ranks of tensor, which is not modelled",
        ),
        (
            MEGATRON,
            {"data": 9, "tensor": 2, "expert_tensor": 3},
            "parallel.expert_tensor: 3 and tensor = 2 must divide one another; "
            "use another expert_tensor",
        ),
        (
            Megatron(allreduce_in_float32=True),
            {"expert": 4},
            "zero.megatron.allreduce_in_float32: true is not modelled with parallel.expert = 4",
        ),
        (
            FSDP2(),
            {"expert": 4, "expert_tensor": 2},
            "parallel.expert_tensor: 2 must be 1 for FSDP2, which does not shard experts",
        ),
        (
            FSDP1(),
            {"expert": 4},
            "parallel.expert: 4 is modelled for emulate = deepspeed, fsdp2 or megatron and zsim's "
            "own stages alone",
        ),
    ],
)
def test_degrees_of_experts_that_a_runtime_does_not_have_are_one_line(
    runtime: RuntimeOptions, changes: dict[str, object], line: str
) -> None:
    assert refusal(runtime, **{"data": 8, **changes}) == line


def test_a_context_degree_with_an_error_of_its_own_has_no_second_one() -> None:
    line = refusal(data=8, context=3, expert=4)
    assert line == "parallel.context: 3 must divide data = 8"
    assert strategy_of(data=4, context=2, expert=2).parallel.exchange(None) is (
        ContextExchange.ALL_GATHER
    )


@given(
    tensor=st.integers(1, 4),
    context=st.integers(1, 4),
    data=st.integers(1, 6),
    expert=st.integers(1, 12),
    expert_tensor=st.integers(1, 4),
)
def test_degrees_that_a_message_proposes_fit(
    tensor: int, context: int, data: int, expert: int, expert_tensor: int
) -> None:
    dense = (("tensor", tensor), ("context", context), ("data", data))
    for error in against_order(dense, expert, expert_tensor):
        text = str(error)
        if "use at most" in text or "use another" in text:
            continue
        proposed = re.search(r"; use ([\d, or]+)", text)
        assert proposed is not None
        for word in re.findall(r"\d+", proposed[1]):
            assert not [*against_order(dense, int(word), expert_tensor)]
