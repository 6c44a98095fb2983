"""The runtime that a scenario asks for, and what one line says if it cannot be."""

import tomllib
from datetime import date

import pytest

import zsim_scenarios
from zsim.config_error import ConfigError
from zsim.dtype import DType
from zsim.model.architecture import GPT
from zsim.model.gpt import gpt
from zsim.runtimes.lookup import runtimes
from zsim.runtimes.registry import make_schedule
from zsim.scenario.runtime_tables import emulated, stage_of
from zsim.scenario.tables import ScenarioError, ZeroTable, from_tables
from zsim.strategy.runtime_options import RuntimeOptions
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim_runtimes.deepspeed.options import DeepSpeed
from zsim_runtimes.fsdp2.options import FSDP2


def table(**keys: object) -> ZeroTable:
    return from_tables(tomllib.loads(zsim_scenarios.text("tiny")) | {"zero": keys}).zero


def test_without_emulate_the_order_is_our_own() -> None:
    assert emulated(table(stage=2)) is None


def test_a_runtime_has_its_own_defaults_and_the_options_of_its_table() -> None:
    assert emulated(table(emulate="fsdp2")) == FSDP2()
    options = {"reshard_after_forward": 4, "reduce_dtype": "fp32"}
    runtime = emulated(table(emulate="fsdp2", fsdp2=options))
    assert runtime == FSDP2(reshard_after_forward=4, reduce_dtype=DType.FP32)


def test_a_whole_number_may_be_written_with_an_exponent() -> None:
    runtime = emulated(table(emulate="deepspeed", deepspeed={"reduce_bucket_size": 2e8}))
    assert runtime == DeepSpeed(reduce_bucket_size=200_000_000)


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"fsdp2": {}}, 'zero.fsdp2: stands with emulate = "fsdp2"'),
        ({"emulate": "fsdp1", "fsdp2": {}}, 'zero.fsdp2: stands with emulate = "fsdp2"'),
        (
            {"emulate": "fsdp2", "fsdp2": {"reshard": True}},
            "zero.fsdp2.reshard: unknown key; ",
        ),
        (
            {"emulate": "fsdp2", "fsdp2": {"reshard_after_forward": "yes"}},
            "zero.fsdp2.reshard_after_forward: 'yes' must be true or false or a whole number",
        ),
        (
            {"emulate": "fsdp2", "fsdp2": {"reshard_after_forward": 1}},
            "zero.fsdp2.reshard_after_forward: 1 must be at least 2",
        ),
        (
            {"emulate": "fsdp2", "fsdp2": {"reduce_dtype": "int8"}},
            "zero.fsdp2.reduce_dtype: 'int8' must be fp16, bf16, fp32 or fp64",
        ),
        (
            {"emulate": "megatron", "megatron": {"overlap_param_gather": True}},
            "zero.megatron.overlap_param_gather: true needs overlap_grad_reduce = true",
        ),
        (
            {"emulate": "fsdp2", "fsdp2": {"forward_prefetch": date(2026, 1, 31)}},
            "zero.fsdp2.forward_prefetch: datetime.date(2026, 1, 31) must be a whole number",
        ),
        (
            {"deepspeed_config": "ds_config.json"},
            "zero.deepspeed_config: 'ds_config.json' was not read",
        ),
    ],
)
def test_one_line_says_which_option_is_wrong(keys: dict[str, object], line: str) -> None:
    with pytest.raises(ScenarioError) as error:
        emulated(table(**keys))
    assert str(error.value).startswith(line)


def test_all_wrong_options_are_told_at_once_with_what_else_is_wrong() -> None:
    options = {"forward_prefetch": -1, "reduce_dtype": "int8", "reshard": True}
    with pytest.raises(ScenarioError) as error:
        table(stage=4, emulate="fsdp2", fsdp2=options)
    told = str(error.value).split("; also ")
    assert [each.partition(":")[0] for each in told] == [
        "zero.stage",
        "zero.fsdp2.reshard",
        "zero.fsdp2.reduce_dtype",
        "zero.fsdp2.forward_prefetch",
    ]


@pytest.mark.parametrize("runtime", [each.options() for each in runtimes().values()])
def test_a_stage_is_needed_where_a_runtime_has_several_and_none_is_usual(
    runtime: RuntimeOptions,
) -> None:
    stages = runtime.stages
    if len(stages) == 1 or runtime.usual_stage is not None:
        assert stage_of(table(), runtime) == (runtime.usual_stage or stages[0])
        return
    listed = ", ".join(map(str, stages))
    with pytest.raises(ScenarioError, match=rf"^zero\.stage: missing; must be {listed}$"):
        stage_of(table(), runtime)


def test_our_own_order_needs_a_stage() -> None:
    with pytest.raises(ScenarioError, match=r"^zero\.stage: missing; must be 0, 1, 2, 3$"):
        stage_of(table(), None)


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"zero.stage": 2, "zero.emulate": FSDP2()}, "zero.stage: 2 must be 3 for FSDP2"),
        (
            {"zero.stage": 3, "zero.emulate": FSDP2(), "zero.prefetch_units": 4},
            "zero.prefetch_units: 4 is for zsim's own stages; with emulate it stays at 1",
        ),
        (
            {
                "zero.stage": 3,
                "parallel.data": 6,
                "zero.emulate": FSDP2(reshard_after_forward=4),
            },
            "zero.fsdp2.reshard_after_forward: 4 must divide data = 6",
        ),
        (
            {"zero.stage": 3, "parallel.data": 6, "zero.secondary": 4},
            "zero.secondary: 4 must divide data = 6",
        ),
    ],
)
def test_a_strategy_refuses_what_a_runtime_does_not_have(
    keys: dict[str, object], line: str
) -> None:
    with pytest.raises(ConfigError) as error:
        Strategy.of(keys)
    assert str(error.value).startswith(line)


def test_sharded_again_over_all_ranks_is_freed_as_with_true() -> None:
    options = (True, 4)
    strategies = [
        Strategy(
            parallel=Parallel(data=4), zero=Zero(stage=3, emulate=FSDP2(reshard_after_forward=each))
        )
        for each in options
    ]
    shape = GPT(layers=1, hidden_size=4, attention_heads=1, sequence_length=2, vocab_size=5)
    freed, again = (make_schedule(gpt(shape, micro_batch_size=1), each) for each in strategies)
    assert freed.programs == again.programs
    assert freed.groups == again.groups
