"""Stages of a pipeline as roles: what each runs, holds and sends, and what is proved of it."""

from collections import Counter, defaultdict
from collections.abc import Sequence

import pytest
from exact_training import proves_and_trains
from fitting import fitting
from hypothesis import given, settings
from hypothesis import strategies as st
from uniform_stages import CHUNK_PS, saved_peak, uniform_step_ps

from zsim.analysis.schedule_plan import plan, wire_bytes
from zsim.config_error import ConfigError
from zsim.model.architecture import Llama
from zsim.model.equal_units import equal_units
from zsim.model.model import Model, ModelError
from zsim.model.pipeline_stages import in_blocks, places
from zsim.proof import check
from zsim.runtimes.registry import make_schedule
from zsim.schedule.access import views_of
from zsim.schedule.operation import (
    Compute,
    Fill,
    Operation,
    Receive,
    Send,
)
from zsim.schedule.replace import replace
from zsim.schedule.schedule import Schedule
from zsim.strategy.activations import Activations, Checkpointing
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import Train
from zsim_runtimes.fsdp1.options import FSDP1
from zsim_runtimes.nanotron.options import Nanotron, TensorMode

SHAPE = Llama(layers=4, hidden_size=8, attention_heads=2, sequence_length=4, vocab_size=6)
CUT = Nanotron(tp_mode=TensorMode.REDUCE_SCATTER)
KEPT = CUT.but(tp_recompute_allgather=False)
WHOLE = Nanotron(keep_head_whole=True)


def strategy_of(pipeline: int, micro_batches: int, options: Nanotron | None = None) -> Strategy:
    return Strategy(
        parallel=Parallel(pipeline=pipeline),
        zero=Zero(stage=1, emulate=options or Nanotron()),
        train=Train(
            gradient_accumulation_steps=micro_batches, precision=Precision.BF16, clip_norm=1.0
        ),
    )


def model_of(strategy: Strategy, shape: Llama = SHAPE) -> Model:
    return in_blocks(fitting(shape, strategy))


@pytest.mark.matrix(15)
@pytest.mark.parametrize(
    ("strategy", "shape"),
    [
        (strategy_of(2, 3, CUT).but({"parallel.data": 2, "parallel.tensor": 2}), SHAPE),
        # More stages than matrices: the cast has one of its own, and the loss, without parameters.
        (strategy_of(6, 6).but({"parallel.data": 2}), replace(SHAPE, layers=2, vocab_size=160)),
        # The last stage has nothing to update, and no norm to wait for.
        (
            strategy_of(6, 2).but({"train.clip_norm": None}),
            replace(SHAPE, layers=2, vocab_size=160),
        ),
        (
            strategy_of(6, 2).but(
                {"zero.stage": 0, "train.clip_norm": None, "train.precision": Precision.FP16}
            ),
            replace(SHAPE, layers=2, vocab_size=160),
        ),
        (
            strategy_of(3, 2, KEPT).but(
                {"zero.stage": 0, "parallel.tensor": 2, "train.precision": Precision.FP16}
            ),
            SHAPE,
        ),
        # The rule would leave the loss to the last stage.
        (
            strategy_of(5, 4, WHOLE).but({"zero.stage": 0, "parallel.data": 2}),
            replace(SHAPE, vocab_size=160),
        ),
        (
            strategy_of(4, 2).but(
                {"train.precision": Precision.FP32, "activations.checkpointing": Checkpointing.FULL}
            ),
            SHAPE,
        ),
    ],
)
def test_stages_train_what_one_process_does_and_are_proved(
    strategy: Strategy, shape: Llama
) -> None:
    model = model_of(strategy, shape)
    made = make_schedule(model, strategy)
    proves_and_trains(made, model, strategy)


@pytest.mark.one_commit_in(18)
@settings(max_examples=5, deadline=None)
@given(st.data())
def test_any_pipeline_is_proved_and_carries_the_values_of_one_process(data: st.DataObject) -> None:
    strategy = Strategy(
        parallel=Parallel(
            data=data.draw(st.integers(1, 2)),
            tensor=data.draw(st.integers(1, 2)),
            pipeline=data.draw(st.integers(2, 5)),
        ),
        zero=Zero(
            stage=data.draw(st.sampled_from([0, 1])),
            emulate=data.draw(st.sampled_from([Nanotron(), CUT, KEPT])),
        ),
        activations=Activations(checkpointing=data.draw(st.sampled_from(Checkpointing))),
        train=Train(
            gradient_accumulation_steps=data.draw(st.integers(1, 5)),
            precision=data.draw(st.sampled_from([Precision.FP16, Precision.BF16, Precision.FP32])),
            clip_norm=data.draw(st.sampled_from([None, 1.0])),
        ),
    )
    model = model_of(strategy, replace(SHAPE, layers=data.draw(st.integers(4, 5))))
    made = make_schedule(model, strategy)
    proves_and_trains(made, model, strategy)


def test_a_plan_is_that_of_the_stage_that_holds_most() -> None:
    strategy = strategy_of(2, 2)
    model = model_of(strategy)
    found = plan(make_schedule(model, strategy), model)
    assert (found.role, found.mesh[0]) == ("stage0", ("pipeline", 2))


def test_a_plan_has_every_stage_of_a_pipeline() -> None:
    strategy = strategy_of(3, 2).but({"parallel.tensor": 2})
    model = model_of(strategy)
    made = make_schedule(model, strategy)
    found = plan(made, model)
    assert [each.role for each in found.stages] == ["stage0", "stage1", "stage2"]
    units = [unit for each in found.stages for unit in each.units]
    assert units == [unit.name for unit in model.units]
    assert sum(each.parameters for each in found.stages) == model.parameter_count
    assert max(each.peak.bytes for each in found.stages) == found.peak.bytes
    assert [each.wire_bytes for each in found.stages] == [
        wire_bytes(made, program) for program in made.programs
    ]


def test_equal_units_are_dealt_out_to_stages_and_proved() -> None:
    strategy = strategy_of(4, 2)
    model = in_blocks(equal_units(parameters=1000, units=9, precision=Precision.BF16))
    made = make_schedule(model, strategy)
    assert check(made, model) == ()
    counts = [len(each.units) for each in plan(made, model).stages]
    assert counts == [3, 2, 2, 2]  # a stage ends with the unit that takes it beyond its share


PLAYBOOK_1B = Llama(
    layers=16,
    hidden_size=32,
    attention_heads=2,
    sequence_length=4,
    vocab_size=64 * 32,
    intermediate_size=4 * 32,
)
"""The vocabulary and MLP of the 1B model of the Ultra-Scale Playbook, in hidden sizes."""


def test_blocks_are_dealt_out_by_their_matrices_as_nanotron_does() -> None:
    strategy = strategy_of(8, 8)
    model = model_of(strategy, PLAYBOOK_1B)
    # A layer costs 4 + 3 x 4 = 16 squares of the hidden size, the head 64: 320 in all, 40 a stage.
    # A stage ends with the block that makes it more than its share, which is after 3, 6, 8, 11, 13
    # and 16 layers: 48, 96, 128, 176, 208 and 256 are more than 40, 80, 120, 160, 200 and 240. Norm
    # and head are the next one, and with 320 more than 280: cast and loss are left to the last.
    found = places(model, 8)
    assert Counter(found) == {0: 1 + 3, 1: 3, 2: 2, 3: 3, 4: 2, 5: 3, 6: 2, 7: 2}
    assert [unit.name for unit in model.units[-4:]] == ["head0", "head1", "head2", "head3"]


def test_the_head_stays_with_its_loss_where_it_is_kept_whole() -> None:
    """Seven stages share 16 layers, and the eighth has what follows them."""
    model = model_of(strategy_of(8, 8), PLAYBOOK_1B)
    # A stage ends with the layer that makes it more than 16 / 7 = 2.3 layers, that is after 3, 5,
    # 7, 10, 12, 14 and 16: more than 2.3, 4.6, 6.9, 9.1, 11.4, 13.7, and all of them.
    found = places(model, 8, head_is_on_one_stage=True)
    assert Counter(found) == {0: 1 + 3, 1: 2, 2: 2, 3: 3, 4: 2, 5: 2, 6: 2, 7: 4}
    # In four stages nothing parts: a share is just five layers, with which a stage is full.
    assert Counter(places(model, 4, head_is_on_one_stage=True)) == {0: 1 + 5, 1: 5, 2: 5, 3: 1 + 4}
    assert Counter(places(model, 4)) == {0: 1 + 6, 1: 5, 2: 5, 3: 4}


@given(st.integers(4, 40), st.integers(2, 12), st.sampled_from([6, 40, 160, 640]))
def test_a_head_kept_whole_is_on_one_stage_and_fills_as_many_as_there_are(
    layers: int, pipeline: int, vocabulary: int
) -> None:
    shape = replace(SHAPE, layers=layers, vocab_size=vocabulary)
    model = model_of(strategy_of(2, 2), shape)
    parted = places(model, pipeline)
    found = places(model, pipeline, head_is_on_one_stage=True)
    assert found == sorted(found)
    if parted[-1] == pipeline - 1 and layers >= pipeline:
        assert set(found) == set(range(pipeline))
        assert found[-3] == found[-1] == pipeline - 1  # head, cast and loss


@pytest.mark.parametrize(("pipeline", "micro_batches"), [(4, 6), (4, 2), (3, 3)])
def test_a_stage_keeps_a_micro_batch_for_itself_and_each_stage_behind_it(
    pipeline: int, micro_batches: int
) -> None:
    strategy = strategy_of(pipeline, micro_batches)
    model = model_of(strategy)
    by_stage = Counter[int]()
    for unit, stage in zip(model.units, places(model, pipeline), strict=True):
        # In bf16 the bytes that a segment saves are even, but for those of one-byte masks.
        by_stage[stage] += sum(-(-each.saved_bytes // 2) * 2 for each in unit.segments)
    for stage, program in enumerate(make_schedule(model, strategy).programs):
        # P - s micro-batches are under way on stage s, or all there are.
        alive = min(pipeline - stage, micro_batches)
        assert saved_peak(program) == alive * by_stage[stage]


@pytest.mark.parametrize(("pipeline", "micro_batches"), [(2, 1), (2, 5), (4, 4), (4, 7), (5, 4)])
def test_a_step_takes_its_micro_batches_and_the_bubble(pipeline: int, micro_batches: int) -> None:
    strategy = strategy_of(pipeline, micro_batches)
    model = model_of(strategy)
    made = make_schedule(model, strategy)
    # (m + P - 1) (f + b), of which (P - 1) (f + b) is the bubble (Narayanan et al. 2021, 2.2.1).
    assert uniform_step_ps(made, model) == (micro_batches + pipeline - 1) * CHUNK_PS


def test_neighbors_send_hidden_states_on_and_their_gradients_back() -> None:
    strategy = strategy_of(3, 5, CUT).but({"parallel.tensor": 2})
    made = make_schedule(model_of(strategy), strategy)
    sent = [
        [line.bytes for line in wire_bytes(made, program) if line.group == "pipeline"]
        for program in made.programs
    ]
    # 4 tokens of 8 elements in bf16, of which each of 2 tensor ranks has its own tokens: 32 bytes,
    # in each of 5 micro-batches. The one in the middle sends both ways.
    assert sent == [[5 * 32], [2 * 5 * 32], [5 * 32]]


def with_step(made: Schedule, stage: int, step: Sequence[Operation]) -> Schedule:
    programs = list(made.programs)
    programs[stage] = replace(programs[stage], step=tuple(step))
    return replace(made, programs=tuple(programs))


def test_a_stage_that_sends_gradients_before_it_takes_activations_never_ends() -> None:
    """What nanotron's order is for: both wait until the other takes what they send."""
    strategy = strategy_of(2, 3)
    model = model_of(strategy)
    made = make_schedule(model, strategy)
    step = list(made.programs[1].step)
    kinds = [type(operation) for operation in step]
    second = kinds.index(Receive, kinds.index(Receive) + 1)
    sends = kinds.index(Send)
    assert second < sends
    step.insert(second, step.pop(sends))
    found = check(with_step(made, 1, step), model)
    assert any(each.invariant == "progress" for each in found)


def test_what_is_handed_on_of_another_micro_batch_is_found() -> None:
    """The last stage takes the first two micro-batches for each other."""
    strategy = strategy_of(2, 3)
    model = model_of(strategy)
    made = make_schedule(model, strategy)
    other = {0: 1, 1: 0, 2: 2}
    step = [
        replace(each, micro_batch=other[each.micro_batch]) if isinstance(each, Compute) else each
        for each in made.programs[1].step
    ]
    (found,) = check(with_step(made, 1, step), model)
    # It computes with activations of another micro-batch, whose tokens the loss is not of.
    assert (found.invariant, found.role) == ("values", "stage1")
    assert found.operation == "step/forward/mb0/block3/forward0"


def test_a_gradient_that_keeps_what_the_step_before_left_is_found() -> None:
    """A proof takes what a step writes over for any number: without that it counts."""
    strategy = strategy_of(2, 3)
    model = model_of(strategy)
    made = make_schedule(model, strategy)
    step = made.programs[1].step
    (first, *_) = (each for each in step if isinstance(each, Fill))
    found = check(with_step(made, 1, [each for each in step if each is not first]), model)
    assert found[0].invariant == "values"


def test_micro_batches_of_a_slot_share_operands_and_views() -> None:
    """Proof and simulation know by identity the operands that they look at once."""
    strategy = strategy_of(3, 7)
    made = make_schedule(model_of(strategy), strategy)
    for stage, program in enumerate(made.programs):
        seen = defaultdict[tuple[object, ...], list[tuple[int, ...]]](list)
        for each in program.step:
            if isinstance(each, Compute) and each.unit:
                seen[each.unit, each.segment, each.action].append(views_of(each))
        assert {len(each) for each in seen.values()} - {1} == {7}  # an update comes once
        assert {len(set(each)) for each in seen.values() if len(each) == 7} == {3 - stage}


def test_what_no_pipeline_can_be_is_refused() -> None:
    why = "pipeline: 2 is modelled for emulate = fsdp2, megatron or nano"
    with pytest.raises(ConfigError, match=why):
        Strategy(parallel=Parallel(pipeline=2), zero=Zero(stage=3))
    with pytest.raises(ConfigError, match=why):
        Strategy(parallel=Parallel(pipeline=2), zero=Zero(stage=3, emulate=FSDP1()))
    with pytest.raises(ConfigError, match=r"activations\.partition: true is not modelled"):
        strategy_of(2, 2).but(
            {"activations.checkpointing": Checkpointing.FULL, "activations.partition": True}
        )
    tied = strategy_of(2, 2)
    with pytest.raises(ModelError, match=r"model.tied_embeddings: .* stages 0 and 1"):
        make_schedule(model_of(tied, replace(SHAPE, tied_embeddings=True)), tied)
    many = strategy_of(9, 8)
    with pytest.raises(ModelError, match=r"parallel.pipeline: 9 stages are more than the"):
        make_schedule(model_of(many), many)
