"""FSDP2's pipelines whose backwards are in two parts: what is trained, held, timed and proved."""

from collections import Counter
from dataclasses import dataclass, replace

import pytest
from exact_training import STEPS, cluster, trained
from fsdp2_pipelines import KEPT, SHAPE, model_of, strategy_of
from hypothesis import given, settings
from hypothesis import strategies as st

from zsim.backend.backend import Job
from zsim.dtype import DType
from zsim.model.equal_units import equal_units
from zsim.model.model import Model, ModelError
from zsim.proof import check
from zsim.runtimes.registry import make_schedule
from zsim.schedule.operation import (
    Action,
    Allocate,
    Compute,
    Copy,
    Free,
    Receive,
    Send,
)
from zsim.schedule.schedule import Program, Schedule
from zsim.strategy.activations import Checkpointing
from zsim.strategy.execution import Execution
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Strategy
from zsim_des import SimBackend
from zsim_des.values import train
from zsim_runtimes.fsdp2.options import FSDP2, PipelineSchedule
from zsim_runtimes.fsdp2.order import Reshard, Unshard, WeightTask, interleaved_zero_bubble
from zsim_runtimes.stage_actions import Direction, Reduce, Task

SPLIT = KEPT.but(pipeline_schedule=PipelineSchedule.INTERLEAVED_ZERO_BUBBLE)
IN_V = KEPT.but(pipeline_schedule=PipelineSchedule.ZERO_BUBBLE_IN_V)


def model_in_parts(strategy: Strategy, layers: int = 4) -> Model:
    """A model as scenarios have it: its loss is a segment of its own."""
    return model_of(strategy, replace(SHAPE, layers=layers, execution=strategy.execution))


@pytest.mark.matrix(24)
@pytest.mark.parametrize(
    ("strategy", "layers"),
    [
        (strategy_of(2, 4, SPLIT.but(reduce_dtype=None)).but({"train.clip_norm": None}), 4),
        (strategy_of(4, 6, SPLIT).but({"parallel.data": 2, "parallel.replicate": 2}), 9),
        (
            strategy_of(2, 6, SPLIT).but({"parallel.data": 2, "train.precision": Precision.FP16}),
            4,
        ),
        (strategy_of(3, 3, SPLIT.but(pipeline_stages_per_rank=4)).but({"parallel.data": 2}), 10),
        # a chunk is gathered anew between its first part and its second
        (strategy_of(4, 1, SPLIT.but(pipeline_stages_per_rank=4)), 14),
        (strategy_of(2, 2, SPLIT).but({"train.precision": Precision.FP64}), 4),
        (strategy_of(2, 1, IN_V).but({"train.clip_norm": None}), 4),
        (strategy_of(2, 2, SPLIT.but(reduce_dtype=None)).but({"parallel.tensor": 2}), 4),
        (
            strategy_of(3, 4, IN_V.but(enable_sequence_parallel=False)).but(
                {"parallel.tensor": 2, "train.precision": Precision.FP16}
            ),
            6,
        ),
        (
            strategy_of(3, 7, IN_V).but({"parallel.data": 2, "train.precision": Precision.FP16}),
            7,
        ),
    ],
)
def test_stages_train_what_one_process_does_and_are_proved(strategy: Strategy, layers: int) -> None:
    # also where the loss is no segment of its own
    for model in (
        model_in_parts(strategy, layers=layers),
        model_of(strategy, replace(SHAPE, layers=layers)),
    ):
        made = make_schedule(model, strategy)
        assert check(made, model) == ()
        result = trained(made, model, train(model, strategy, STEPS))
        assert result.is_right, result


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 5), st.integers(2, 5), st.integers(1, 3), st.booleans())
def test_second_parts_follow_their_first_and_come_before_the_reduction(
    stages: int, chunks: int, rounds: int, odd: bool
) -> None:
    count = (stages + (odd and rounds < stages)) * rounds
    for index, order in enumerate(interleaved_zero_bubble(stages, chunks, count)):
        whole: set[int] = set()
        first: list[tuple[int, int]] = []
        left = Counter(dict.fromkeys(range(chunks), count))
        behind = 0
        for action in order:
            match action:
                case Unshard(chunk):
                    whole.add(chunk)
                case Reshard(chunk):
                    whole.remove(chunk)
                case Task(direction=Direction.BACKWARD):
                    first.append((action.chunk, action.micro_batch))
                    behind = max(behind, len(first))
                case WeightTask(chunk, micro_batch):
                    assert chunk in whole
                    assert first.pop(0) == (chunk, micro_batch)
                    left[chunk] -= 1
                case Reduce(chunk):
                    assert not left[chunk]
                    del left[chunk]
                case _:
                    pass
        assert not first
        assert not left
        assert behind == min(index + 1, chunks * count)


@dataclass(frozen=True)
class ThreeParts:
    """Forwards and both parts of backwards of a chunk take so long; everything else nothing."""

    made: Schedule
    forward_ps: int
    input_ps: int
    weight_ps: int

    def issue_ps(self, rank: int, step: int, operation: str) -> int:
        del rank, step, operation
        return 0

    def kernel_ps(self, rank: int, step: int, operation: str) -> int:
        del step
        found = self.made.program_of(rank).by_id[operation]
        if not isinstance(found, Compute) or not found.unit.startswith("block"):
            return 0
        match found.action:
            case Action.FORWARD:
                return self.forward_ps
            case Action.BACKWARD:
                return self.input_ps + self.weight_ps
            case Action.BACKWARD_INPUT:
                return self.input_ps
            case Action.BACKWARD_WEIGHT:
                return self.weight_ps
            case _:
                return 0

    def communication_ps(self, step: int, operation: str) -> int:
        del step, operation
        return 0


def step_ps(
    pipeline: int, micro_batches: int, times: tuple[int, int, int], options: FSDP2 = SPLIT
) -> int:
    """Return the time of a step in the middle of a training; virtual stages have a block each."""
    options = options.but(first_stage_less_layers=0, last_stage_less_layers=0)
    strategy = strategy_of(pipeline, micro_batches, options)
    if options.stages_in_v:  # no stage waits for others with its update
        strategy = strategy.but({"train.clip_norm": None})
    model = model_in_parts(strategy, layers=2 * pipeline)
    made = make_schedule(model, strategy)
    job = Job(schedule=made, model=model, cluster=cluster(made.mesh.size), steps=2)
    first, second = SimBackend(durations=ThreeParts(made, *times)).step_ends_ps(job)
    return second - first


@pytest.mark.matrix(9)
@pytest.mark.parametrize(("pipeline", "micro_batches"), [(2, 4), (4, 8), (4, 4)])
@pytest.mark.parametrize("times", [(70, 70, 70), (70, 90, 50)])
def test_second_parts_fill_the_bubble(
    pipeline: int, micro_batches: int, times: tuple[int, int, int]
) -> None:
    forward, inputs, weights = times
    # v m (f + i + w) and a bubble of (P - 1) (f + i - w), all of a chunk (Qi et al. 2023, table 1)
    whole = 2 * micro_batches * (forward + inputs + weights)
    bubble = (pipeline - 1) * (forward + inputs - weights)
    assert step_ps(pipeline, micro_batches, times) == whole + bubble


@pytest.mark.parametrize(("pipeline", "micro_batches"), [(2, 4), (4, 8), (4, 7)])
def test_stages_in_a_v_have_no_bubble_if_all_parts_take_as_long(
    pipeline: int, micro_batches: int
) -> None:
    # Qi et al. 2023, section 6; stages begin their next step one after the other
    assert step_ps(pipeline, micro_batches, (70, 70, 70), IN_V) == 2 * micro_batches * 3 * 70


def test_both_ends_of_the_model_are_on_the_first_stage_of_a_v() -> None:
    strategy = strategy_of(3, 4, IN_V)
    model = model_in_parts(strategy, layers=7)
    made = make_schedule(model, strategy)
    units = [
        list(dict.fromkeys(each.unit for each in program.step if isinstance(each, Compute)))
        for program in made.programs
    ]
    # 7 layers and one each for the ends are 9 for 6 virtual stages: 2, 2, 2, 1, 1 and 1
    own = [[name for name in each if name.startswith("block")] for each in units]
    assert own == [["block0"], ["block1", "block2", "block6"], ["block3", "block4", "block5"]]
    assert {"embedding", "head0", "head1"} <= set(units[0])
    # The last stage hands on to itself without a message.
    moved = [
        Counter(each.group for each in program.step if isinstance(each, Send | Receive))
        for program in made.programs
    ]
    assert moved == [
        {"pipeline0_1": 4 * 4},
        {"pipeline0_1": 4 * 4, "pipeline1_2": 4 * 4},
        {"pipeline1_2": 4 * 4},
    ]
    loads = [each for each in made.programs[0].step if isinstance(each, Compute)]
    assert sum(each.action is Action.LOAD for each in loads) == 4


def alive_at_most(program: Program, part: str) -> int:
    """Return the most buffers with such a name that are alive at once."""
    alive = most = 0
    for each in program.step:
        if isinstance(each, Allocate | Free) and part in each.buffer:
            alive += 1 if isinstance(each, Allocate) else -1
            most = max(most, alive)
    return most


def test_a_stage_holds_what_first_parts_leave_until_their_second() -> None:
    options = SPLIT.but(first_stage_less_layers=0, last_stage_less_layers=0)
    strategy = strategy_of(4, 8, options)
    made = make_schedule(model_in_parts(strategy, layers=8), strategy)
    # On stage s second parts are s behind. The first chunk of the model leaves nothing.
    held = [alive_at_most(program, "/intermediate") for program in made.programs[:3]]
    assert held == [1, 2, 3]


def test_gradients_of_weights_add_up_in_their_own_format_until_the_next_first_part() -> None:
    strategy = strategy_of(4, 8, SPLIT).but({"parallel.data": 2})
    made = make_schedule(model_in_parts(strategy, layers=9), strategy)
    program = made.programs[3]
    formats = {
        program.by_name[each.target.buffer].dtype
        for each in program.step
        if isinstance(each, Copy) and each.accumulate and "/gradient" in each.source.buffer
    }
    assert formats == {DType.BF16, DType.FP32}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"train.compile": True}, "train.compile: true with InterleavedZeroBubble: PyTorch"),
        (
            {"activations.checkpointing": Checkpointing.FULL},
            "activations.checkpointing: full with InterleavedZeroBubble: every parameter",
        ),
        (
            {"activations.checkpointing": Checkpointing.SELECTIVE},
            "activations.checkpointing: selective with",
        ),
        (
            {"parallel.context": 2, "parallel.data": 2},
            "parallel.context: 2 with InterleavedZeroBubble: is not",
        ),
        ({"train.float8": "rowwise"}, "train.float8: rowwise with InterleavedZeroBubble: is not"),
        (
            {"zero.emulate": SPLIT.but(reduce_dtype=DType.FP16)},
            "zero.fsdp2.reduce_dtype: fp16 with InterleavedZeroBubble: sums in it and in bf16",
        ),
        ({"train.gradient_accumulation_steps": 5}, "5 must be a multiple of 2, its rounds of 2"),
    ],
)
def test_what_does_not_go_with_two_parts_is_refused(changes: dict[str, object], why: str) -> None:
    strategy = strategy_of(2, 4, SPLIT).but(changes)
    execution = Execution(context=strategy.parallel.context)
    model = model_of(strategy, replace(SHAPE, execution=execution))
    with pytest.raises(ModelError, match=why):
        make_schedule(model, strategy)


def test_units_whose_parts_cost_nobody_knows_what_are_refused() -> None:
    strategy = strategy_of(2, 4, SPLIT)
    with pytest.raises(ModelError, match="unit unit3: what a backward in two parts costs is not"):
        make_schedule(equal_units(parameters=600, units=6), strategy)
