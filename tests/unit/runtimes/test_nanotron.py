"""nanotron: gradients in fp32 once a step, and hidden states cut by tokens over the tensor axis."""

import pytest
from exact_training import proves_and_trains
from fitting import fitting

from zsim.config_error import ConfigError
from zsim.model.architecture import Llama
from zsim.model.model import Model
from zsim.proof import check
from zsim.runtimes.registry import make_schedule
from zsim.schedule.operation import (
    Action,
    AllGather,
    AllReduce,
    Compute,
    ReduceScatter,
    Together,
    walk,
)
from zsim.schedule.replace import replace
from zsim.schedule.schedule import Program, Schedule
from zsim.strategy.activations import Checkpointing
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import Train
from zsim_runtimes.nanotron.options import Nanotron, TensorMode

SHAPE = Llama(layers=2, hidden_size=8, attention_heads=2, sequence_length=4, vocab_size=6)
CUT = Nanotron(tp_mode=TensorMode.REDUCE_SCATTER)
KEPT = CUT.but(tp_recompute_allgather=False)


def strategy_of(options: Nanotron, *, stage: int = 1, data: int = 2, tensor: int = 2) -> Strategy:
    return Strategy(
        parallel=Parallel(data=data, tensor=tensor),
        zero=Zero(stage=stage, emulate=options),
        train=Train(gradient_accumulation_steps=2, precision=Precision.BF16, clip_norm=1.0),
    )


def model_of(strategy: Strategy, *, tied: bool = False) -> Model:
    return fitting(replace(SHAPE, tied_embeddings=tied), strategy)


@pytest.mark.matrix(24)
@pytest.mark.parametrize("options", [Nanotron(), CUT, KEPT])
@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("tied", [False, True])
def test_it_trains_what_plain_data_parallelism_does(
    options: Nanotron, stage: int, tied: bool
) -> None:
    strategy = strategy_of(options, stage=stage)
    model = model_of(strategy, tied=tied)
    made = make_schedule(model, strategy)
    proves_and_trains(made, model, strategy)


def test_checkpoints_of_tokens_that_are_cut_are_proved() -> None:
    strategy = strategy_of(CUT).but({"activations.checkpointing": Checkpointing.FULL})
    model = model_of(strategy)
    assert not check(make_schedule(model, strategy), model)


def without(made: Schedule, part: str) -> Schedule:
    """`made` without the operations whose id has `part`."""
    program: Program = made.programs[0]
    step = tuple(each for each in program.step if part not in each.id)
    assert len(step) < len(program.step)
    kept = {operation.id for operation in walk(step)}
    cleaned = tuple(
        replace(each, after=tuple(edge for edge in each.after if edge in kept))
        if isinstance(each, Compute)
        else each
        for each in step
    )
    return replace(made, programs=(replace(program, step=cleaned),))


def test_a_norm_that_is_not_summed_over_the_tensor_axis_is_found() -> None:
    """Each rank has the gradient of its own tokens: what is reduced over data is a summand yet."""
    strategy = strategy_of(CUT, stage=0, data=1)
    model = model_of(strategy)
    found = check(without(make_schedule(model, strategy), "end/sum/"), model)
    assert [each.operation for each in found if each.invariant == "values"] == [
        "step/update/bucket0/update"
    ]


def test_what_is_gathered_once_is_kept_or_gathered_again() -> None:
    def gathers(options: Nanotron) -> int:
        strategy = strategy_of(options, data=1)
        (program,) = make_schedule(model_of(strategy), strategy).programs
        return sum(isinstance(each, AllGather) for each in program.step)

    # Kept: in each of 2 micro-batches 2 blocks gather before attention and MLP, and the head before
    # its logits; backward gathers 2 gradients in each block, and one of the embedding. Again: the
    # same 5 inputs once more.
    assert gathers(KEPT) == 2 * (2 * 2 + 1 + 2 * 2 + 1)
    assert gathers(CUT) == gathers(KEPT) + 2 * 5


def test_cut_tokens_need_less_memory_and_gathering_again_the_least() -> None:
    def saved(options: Nanotron) -> int:
        model = model_of(strategy_of(options, data=1))
        values = sum(value.size_bytes for value in model.values.values())
        return values + sum(part.saved_bytes for unit in model.units for part in unit.segments)

    assert saved(CUT) < saved(KEPT) < saved(Nanotron())


def position(program: Program, part: str) -> int:
    """Place of the last operation of a step whose id has `part`."""
    return max(place for place, each in enumerate(program.step) if part in each.id)


@pytest.mark.parametrize("options", [Nanotron(), CUT])
def test_zero_1_reduces_all_gradients_as_one_after_the_last_backward(options: Nanotron) -> None:
    """Its trainer wraps the model in DistributedDataParallel without ZeRO alone."""
    strategy = strategy_of(options)
    model = model_of(strategy)
    made = make_schedule(model, strategy)
    (program,) = made.programs
    (reduced,) = (
        each
        for each in program.step
        if isinstance(each, Together) and all(isinstance(one, AllReduce) for one in each.members)
    )
    held = {each.name: each for each in program.buffers}
    members = [each for each in reduced.members if isinstance(each, AllReduce)]
    summed = [held[each.whole.buffer] for each in members]
    assert {each.dtype for each in summed} == {Precision.FP32.compute}
    # The rank's own parameters, padded to an even number for two data ranks.
    own = sum(each.elements for each in model.parameters)
    assert own <= sum(each.whole.size for each in members) <= own + len(model.parameters)
    assert position(program, "backward/mb1") < position(program, reduced.id)
    assert not any(
        isinstance(each, ReduceScatter) and each.group == "data" for each in walk(program.step)
    )
    assert not any("staging" in name for name in held)


def test_without_zero_buckets_are_reduced_while_backward_goes_on() -> None:
    strategy = strategy_of(Nanotron(ddp_bucket_cap_mb=1), stage=0)
    wide = replace(SHAPE, hidden_size=256, vocab_size=2048)
    (program,) = make_schedule(fitting(wide, strategy), strategy).programs
    first = next(place for place, each in enumerate(program.step) if "reduce/" in each.id)
    assert first < position(program, "backward/mb1/block0")
    assert any("staging" in each.name for each in program.buffers)


@pytest.mark.parametrize("stage", [0, 1])
def test_each_parameter_is_measured_clipped_and_updated_by_launches_of_its_own(stage: int) -> None:
    strategy = strategy_of(Nanotron(), stage=stage)
    model = model_of(strategy)
    (program,) = make_schedule(model, strategy).programs
    launches = {
        action: sum(
            len(each.kernels)
            for each in program.step
            if isinstance(each, Compute) and each.action is action
        )
        for action in (Action.NORM, Action.CLIP, Action.UPDATE)
    }
    count = len(model.parameters)
    # An update counts its step with a kernel, too: each parameter is a group of the optimizer.
    assert launches == {Action.NORM: count, Action.CLIP: count, Action.UPDATE: 2 * count}


def test_replicas_and_cut_checkpoints_are_refused() -> None:
    with pytest.raises(ConfigError, match="replicate: 2 is not modelled for Nanotron"):
        strategy_of(CUT).but({"parallel.replicate": 2})
    with pytest.raises(ConfigError, match=r"activations\.partition: true cuts what"):
        strategy_of(CUT).but(
            {"activations.checkpointing": Checkpointing.FULL, "activations.partition": True}
        )
