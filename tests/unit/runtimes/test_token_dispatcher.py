"""Dispatchers of tokens of experts in Megatron-LM: options, arguments, and marks in schedules."""

from dataclasses import replace
from typing import Any

import pytest
from exact_training import cluster

from zsim.backend.backend import Job
from zsim.files.source import settled
from zsim.model.architecture import Llama
from zsim.model.expert_transport import ExpertTransport
from zsim.model.experts import Experts
from zsim.model.model import Model
from zsim.model.transformer import transformer
from zsim.proof import check
from zsim.runtimes.config import ConfigQuestion
from zsim.runtimes.registry import make_schedule
from zsim.scenario.tables import ScenarioError
from zsim.scenario.toml import parse
from zsim.scenario.trainer_files import configured
from zsim.schedule.json import decode_value, encode_value
from zsim.schedule.operation import AllToAll, walk
from zsim.schedule.replace import replace as but
from zsim.schedule.schedule import Schedule
from zsim.strategy.execution import DispatchLibrary, TokenDispatch
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import Train
from zsim_runtimes.megatron.config_writer import write
from zsim_runtimes.megatron.options import Megatron
from zsim_torch.admission import refusal
from zsim_torch.supervise.process_group import DeviceChoice

SHAPE = Llama(
    layers=1,
    hidden_size=8,
    attention_heads=2,
    sequence_length=16,
    vocab_size=16,
    intermediate_size=16,
    experts=Experts(count=4, top_k=2, intermediate_size=8),
)


def strategy_of(**options: Any) -> Strategy:  # noqa: ANN401 (any option)
    return Strategy(
        parallel=Parallel.of({"data": 2, "expert": 2}),
        zero=Zero(stage=1, emulate=Megatron.model_validate(options)),
        train=Train(gradient_accumulation_steps=1, precision=Precision.BF16, compile=True),
    )


def built(strategy: Strategy) -> Model:
    shape = replace(SHAPE, execution=strategy.execution)
    return transformer(shape, micro_batch_size=1, precision=Precision.BF16)


def exchanges(schedule: Schedule) -> list[AllToAll]:
    (program,) = schedule.programs
    return [each for each in walk(program.step) if isinstance(each, AllToAll)]


TEXT = """
title = "a dispatcher"
[model]
[cluster]
topology = "dgx_h100_infiniband"
nodes = 1
[zero]
stage = 1
emulate = "megatron"
[train]
"""
FLEX = strategy_of(moe_token_dispatcher_type="flex", moe_deepep_num_sms=24)


def test_a_library_exchanges_tokens_there_and_back_and_plans_once() -> None:
    model = built(FLEX)
    schedule = make_schedule(model, FLEX)
    assert check(schedule, model) == ()
    marks: list[ExpertTransport] = [each.by for each in exchanges(schedule) if each.by]
    assert len(marks) == len(exchanges(schedule)) == 6
    assert {(each.library, each.num_sms) for each in marks} == {(DispatchLibrary.DEEPEP, 24)}
    assert [(each.returns, each.rides, each.plans) for each in marks] == [
        (False, False, True),  # tokens, then their weights
        (False, True, False),
        (True, False, False),
        (False, False, False),  # backward sends gradients the same way
        (True, False, False),
        (True, True, False),
    ]
    assert [each.width for each in marks] == [8, 1, 8, 8, 8, 1]


def test_marks_of_a_library_are_read_back_from_a_file() -> None:
    for each in exchanges(make_schedule(built(FLEX), FLEX)):
        assert decode_value(encode_value(each, AllToAll), AllToAll) == each


def test_an_exchange_by_a_library_does_not_meet_one_of_nccl() -> None:
    one, *_ = exchanges(make_schedule(built(FLEX), FLEX))
    plain = but(one, by=None)
    assert one.agreed != plain.agreed
    assert one.words.endswith("by deepep")
    assert not plain.words.endswith("by deepep")


def test_without_expert_ranks_no_library_is_used() -> None:
    alone = FLEX.but({"parallel.expert": 1})
    assert alone.execution.dispatch is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"moe_flex_dispatcher_backend": "hybridep"},
            "moe_flex_dispatcher_backend: 'hybridep' needs moe_token_dispatcher_type = flex",
        ),
        (
            {"moe_deepep_num_sms": 24},
            "moe_deepep_num_sms: 24 needs moe_token_dispatcher_type = flex, with backend deepep",
        ),
        (
            {"moe_token_dispatcher_type": "flex", "moe_hybridep_num_sms": 32},
            "moe_hybridep_num_sms: 32 needs moe_token_dispatcher_type = flex, with backend",
        ),
    ],
)
def test_options_of_a_library_without_it_are_refused(
    options: dict[str, object], message: str
) -> None:
    changes = [f"zero.megatron.{name}={value}" for name, value in options.items()]
    with pytest.raises(ScenarioError) as caught:
        parse(TEXT, changes)
    assert message in str(caught.value)


ARGUMENTS = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 16"
    " --max-position-embeddings 16 --vocab-size 128 --micro-batch-size 1 --global-batch-size 8"
    " --bf16 --use-distributed-optimizer --num-experts 8 --moe-router-topk 2 --moe-grouped-gemm"
    " --expert-model-parallel-size 4"
)


def of_arguments(words: str) -> Strategy:
    """Return the strategy of a scenario with these arguments of Megatron-LM."""
    text = TEXT.replace("[train]", "megatron_arguments = 'arguments.txt'\n[train]")
    text = text.replace('stage = 1\nemulate = "megatron"\n', "")
    scenario = configured(parse(text), words, key="megatron_arguments")[0]
    return settled("a dispatcher", scenario)[0].strategy


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (
            "--moe-token-dispatcher-type flex",
            TokenDispatch(library=DispatchLibrary.DEEPEP, num_sms=20),
        ),
        (
            "--moe-enable-deepep --moe-deepep-num-sms 24",
            TokenDispatch(library=DispatchLibrary.DEEPEP, num_sms=24),
        ),
        (
            "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep"
            " --moe-hybridep-num-sms 32",
            TokenDispatch(library=DispatchLibrary.HYBRIDEP, num_sms=32),
        ),
        ("--moe-token-dispatcher-type alltoall", None),
    ],
)
def test_arguments_select_the_library_that_exchanges_tokens(
    words: str, found: TokenDispatch | None
) -> None:
    assert of_arguments(f"{ARGUMENTS} {words}").execution.dispatch == found


@pytest.mark.parametrize("words", ["", "--moe-token-dispatcher-type allgather"])
def test_arguments_gather_all_tokens_by_default(words: str) -> None:
    strategy = of_arguments(f"{ARGUMENTS} {words}")
    assert strategy.execution.gathers_experts
    assert strategy.execution.dispatch is None


def test_without_expert_ranks_nothing_is_gathered() -> None:
    alone = strategy_of(moe_token_dispatcher_type="allgather").but({"parallel.expert": 1})
    assert not alone.execution.gathers_experts


@pytest.mark.parametrize("kind", ["alltoall", "allgather"])
def test_a_dispatcher_of_nccl_is_written_and_read_as_an_argument(kind: str) -> None:
    changes = {
        "zero.emulate": "megatron",
        "zero.stage": 1,
        "parallel.expert": 4,
        "train.micro_batch_size": 1,
        "activations.checkpointing": "none",
        "zero.megatron.moe_token_dispatcher_type": kind,
    }
    asked = ConfigQuestion(changes=changes, precision="bf16", sequences=8, sequence_length=16)
    (line,) = (each for each in write(asked).split(" \\\n") if "dispatcher" in each)
    assert line == f"--moe-token-dispatcher-type {kind}"
    assert of_arguments(f"{ARGUMENTS} {line}").execution.gathers_experts is (kind == "allgather")


@pytest.mark.parametrize(
    ("option", "line"),
    [
        (
            {"moe_token_dispatcher_type": "allgather"},
            "moe_token_dispatcher_type: allgather is simulated only; say alltoall",
        ),
        (
            {"moe_shared_expert_overlap": True},
            "moe_shared_expert_overlap: true is simulated only; say false",
        ),
        (
            {"overlap_moe_expert_parallel_comm": True},
            "overlap_moe_expert_parallel_comm: true is simulated only; say false",
        ),
    ],
)
def test_real_ranks_refuse_what_they_do_not_run(option: dict[str, object], line: str) -> None:
    strategy = strategy_of(**option)
    experts = Experts(count=4, top_k=2, intermediate_size=8, shared_intermediate_size=8)
    shape = replace(SHAPE, experts=experts, execution=strategy.execution)
    model = transformer(shape, micro_batch_size=1, precision=Precision.BF16)
    job = Job(schedule=make_schedule(model, strategy), model=model, cluster=cluster(2), steps=1)
    why = refusal(job, device=DeviceChoice.CPU, torchrun=None)
    assert why == f"zero.megatron.{line}"


@pytest.mark.parametrize(
    "words", ["", "--moe-shared-expert-overlap", "--overlap-moe-expert-parallel-comm"]
)
def test_arguments_overlap_exchanges(words: str) -> None:
    all_run = "--moe-token-dispatcher-type alltoall --moe-shared-expert-intermediate-size 64"
    execution = of_arguments(f"{ARGUMENTS} {all_run} {words}").execution
    assert execution.overlaps_shared is ("shared" in words)
    assert execution.merges_micro_batches is ("parallel" in words)


def test_delayed_weight_gradients_are_refused_by_name() -> None:
    words = "--moe-token-dispatcher-type alltoall --overlap-moe-expert-parallel-comm"
    with pytest.raises(ScenarioError, match="--delay-wgrad-compute"):
        of_arguments(f"{ARGUMENTS} {words} --delay-wgrad-compute")


def test_a_dispatcher_is_written_as_arguments_of_megatron() -> None:
    changes = {
        "zero.emulate": "megatron",
        "zero.stage": 1,
        "parallel.expert": 8,
        "train.micro_batch_size": 1,
        "activations.checkpointing": "none",
        "zero.megatron.moe_token_dispatcher_type": "flex",
        "zero.megatron.moe_flex_dispatcher_backend": "hybridep",
        "zero.megatron.moe_hybridep_num_sms": 32,
    }
    asked = ConfigQuestion(changes=changes, precision="bf16", sequences=8, sequence_length=16)
    lines = write(asked).split(" \\\n")
    assert "--moe-token-dispatcher-type flex" in lines
    assert "--moe-flex-dispatcher-backend hybridep" in lines
    assert "--moe-hybridep-num-sms 32" in lines
