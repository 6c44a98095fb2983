"""Hidden states cut by tokens in FSDP2, in Megatron-LM and in zsim's own stages."""

from dataclasses import replace
from itertools import cycle

import pytest
from exact_training import proves_and_trains
from fitting import fitting
from token_ranks import LLAMA, TIED_GPT

from zsim.analysis.schedule_plan import plan
from zsim.config_error import ConfigError
from zsim.model.architecture import GPT, Llama
from zsim.model.model import ModelError
from zsim.proof import check
from zsim.runtimes.registry import make_schedule
from zsim.schedule.operation import (
    AllGather,
    AllReduce,
    Copy,
    Operation,
    ReduceScatter,
    Together,
    walk,
)
from zsim.schedule.schedule import Schedule
from zsim.strategy.activations import Activations, Checkpointing
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import Train
from zsim_runtimes.fsdp2.options import FSDP2, Sync
from zsim_runtimes.megatron.options import Megatron

BASE = Strategy(
    parallel=Parallel(data=2, tensor=2, replicate=2),
    zero=Zero(stage=3, sequence_parallel=True),
    train=Train(gradient_accumulation_steps=2, precision=Precision.BF16, clip_norm=1.0),
)
OVERLAPPED = Megatron(
    sequence_parallel=True,
    overlap_grad_reduce=True,
    overlap_param_gather=True,
    bucket_size=100,
    grad_reduce_in_fp32=True,
)


def emulating(runtime: FSDP2 | Megatron) -> Strategy:
    """Return the strategy with the order of a runtime."""
    zero = Zero(stage=runtime.stages[-1], emulate=runtime)
    return BASE.but({"zero": zero})


WAYS = {
    **{f"stage {stage}": BASE.but({"zero.stage": stage}) for stage in range(4)},
    "FSDP2": emulating(FSDP2()),
    "FSDP2, last": emulating(FSDP2(gradient_sync=Sync.LAST)),
    "Megatron-LM": emulating(Megatron(sequence_parallel=True)),
    "Megatron-LM, overlapped": emulating(OVERLAPPED),
}


def made_of(strategy: Strategy, shape: Llama | GPT = LLAMA) -> Schedule:
    return make_schedule(fitting(shape, strategy), strategy)


@pytest.mark.matrix(24)
@pytest.mark.parametrize(
    ("name", "shape"), list(zip(WAYS, cycle([LLAMA, TIED_GPT]), strict=False)), ids=list(WAYS)
)
def test_it_trains_what_plain_data_parallelism_does(name: str, shape: Llama | GPT) -> None:
    strategy = WAYS[name]
    model = fitting(shape, strategy)
    assert any(value.tensor_sharded for value in model.values.values())
    made = make_schedule(model, strategy)
    proves_and_trains(made, model, strategy)


@pytest.mark.matrix(6)
@pytest.mark.parametrize("name", ["stage 1", "FSDP2", "Megatron-LM"])
def test_a_norm_that_is_not_summed_over_the_tensor_axis_is_found(name: str) -> None:
    """Each rank has the gradient of its own tokens: what is reduced over data is a summand yet."""
    strategy = WAYS[name].but({"parallel.data": 1, "parallel.replicate": 1})
    model = fitting(LLAMA, strategy)
    made = make_schedule(model, strategy)
    (program,) = made.programs
    sums = [each.id for each in program.step if _sums_norms(each)]
    for left_out in (sums[0], sums[-1]):
        step = tuple(each for each in program.step if each.id != left_out)
        broken = replace(made, programs=(replace(program, step=step),))
        assert any(each.invariant == "values" for each in check(broken, model)), left_out


def _sums_norms(operation: Operation) -> bool:
    """Tell whether an operation sums gradients over the tensor axis."""
    members = operation.members if isinstance(operation, Together) else (operation,)
    return operation.id.startswith("step/backward") and any(
        isinstance(each, AllReduce) and each.group == "tensor" for each in members
    )


def test_norms_are_summed_where_each_runtime_does() -> None:
    def sums(name: str) -> int:
        (program,) = made_of(WAYS[name]).programs
        return sum(map(_sums_norms, program.step))

    norms = 2 * LLAMA.layers + 1
    assert sums("FSDP2") == 2 * norms  # DTensor redistributes each of them, in every micro-batch
    assert sums("FSDP2, last") == norms  # whole gradients that have collected, once
    assert sums("stage 2") == 2 * (LLAMA.layers + 1)  # those of a unit together
    assert sums("Megatron-LM") == 1  # flattened
    (program,) = made_of(WAYS["Megatron-LM"]).programs
    copies = [each for each in walk(program.step) if isinstance(each, Copy)]
    assert sum(each.launches for each in copies if "/put/" in each.id) == norms


def test_linear_layers_gather_again_in_backward_unless_autograd_keeps_what_they_read() -> None:
    def gathers(strategy: Strategy) -> int:
        (program,) = made_of(strategy.but({"train.gradient_accumulation_steps": 1})).programs
        return sum(
            isinstance(each, AllGather) and each.group == "tensor" for each in walk(program.step)
        )

    # Forward gathers before attention and MLP of each block and before the logits, backward two
    # gradients in each block and one of the embedding.
    read, gradients = 2 * LLAMA.layers + 1, 2 * LLAMA.layers + 1
    kept, fsdp2 = read + gradients, WAYS["FSDP2"]
    assert gathers(fsdp2) == kept
    assert gathers(WAYS["Megatron-LM"]) == gathers(WAYS["stage 3"]) == kept + read
    full = {"activations": Activations(checkpointing=Checkpointing.FULL)}
    assert gathers(fsdp2.but(full)) == kept + 2 * LLAMA.layers  # blocks run again
    operations = {"activations": Activations(checkpointing=Checkpointing.OPERATIONS)}
    assert gathers(fsdp2.but(operations)) == kept + read


def test_cut_tokens_need_less_memory_and_move_as_much() -> None:
    """An all-reduce moves what a reduce-scatter and an all-gather do (Korthikanti et al. 2022)."""
    cut = emulating(Megatron(sequence_parallel=True)).but({"train.gradient_accumulation_steps": 1})
    whole = cut.but({"zero.emulate": Megatron()})
    plans = [plan(made_of(each, BIG), fitting(BIG, each)) for each in (cut, whole)]
    assert plans[0].peak.bytes < plans[1].peak.bytes

    def moved(strategy: Strategy, kind: type[AllReduce | ReduceScatter]) -> int:
        (program,) = made_of(strategy, BIG).programs
        return sum(
            each.source.size
            for each in walk(program.step)
            if isinstance(each, kind) and each.group == "tensor"
        )

    hidden = BIG.hidden_size * BIG.sequence_length
    scattered = moved(cut, ReduceScatter)
    assert scattered == (2 * 2 * BIG.layers + 2) * hidden
    statistics, norms = 3 * BIG.sequence_length, (2 * BIG.layers + 1) * BIG.hidden_size
    assert moved(whole, AllReduce) == scattered + statistics
    assert moved(cut, AllReduce) == statistics + norms


BIG = replace(LLAMA, hidden_size=16, sequence_length=64)


def test_tokens_that_the_ranks_do_not_divide_are_refused_where_they_are_cut() -> None:
    odd = replace(LLAMA, sequence_length=3)
    for name in ("stage 0", "FSDP2", "Megatron-LM"):
        with pytest.raises(ModelError, match=r"parallel\.tensor: 2 must divide the 3 tokens"):
            fitting(odd, WAYS[name])
    whole = fitting(odd, emulating(FSDP2(enable_sequence_parallel=False)))
    assert not any(value.tensor_sharded for value in whole.values.values())


@pytest.mark.parametrize("name", ["stage 1", "FSDP2", "Megatron-LM"])
def test_checkpoints_that_are_cut_by_tokens_are_not_cut_again(name: str) -> None:
    with pytest.raises(ConfigError, match=r"activations\.partition: true cuts what sequence"):
        WAYS[name].but(
            {"activations.checkpointing": Checkpointing.FULL, "activations.partition": True}
        )


def test_one_tensor_rank_has_nothing_to_cut() -> None:
    alone = emulating(FSDP2()).but({"parallel.tensor": 1})
    assert not alone.cuts_tokens
    off = alone.but({"zero.emulate": FSDP2(enable_sequence_parallel=False)})
    assert made_of(alone).programs == made_of(off).programs
