"""Hidden states that tensor ranks of Megatron-LM's pipeline send in parts, and gather."""

import pytest
from exact_training import proves_and_trains
from megatron_pipelines import OVERLAPPED, SHAPE, model_of, strategy_of

from zsim.analysis.schedule_plan import wire_bytes
from zsim.model.architecture import Llama
from zsim.model.model import ModelError
from zsim.proof import check
from zsim.runtimes.registry import make_schedule
from zsim.schedule.operation import AllGather, Free, HostWait, Send, Together, View
from zsim.schedule.replace import replace
from zsim.schedule.schedule import Program, Schedule
from zsim.strategy.activations import Checkpointing
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Strategy
from zsim_runtimes.megatron.options import Megatron

PARTS = Megatron(scatter_gather_tensors_in_pipeline=True)
CHUNKS = PARTS.but(num_layers_per_virtual_pipeline_stage=1, overlap_p2p_comm=False)


def of_two(pipeline: int, micro_batches: int, options: Megatron = PARTS) -> Strategy:
    return strategy_of(pipeline, micro_batches, options).but({"parallel.tensor": 2})


@pytest.mark.matrix(9)
@pytest.mark.parametrize(
    ("strategy", "layers"),
    [
        (of_two(4, 3), 4),
        (
            of_two(2, 3, OVERLAPPED.but(scatter_gather_tensors_in_pipeline=True)).but(
                {
                    "parallel.data": 2,
                    "train.precision": Precision.FP16,
                    "activations.checkpointing": Checkpointing.FULL,
                }
            ),
            4,
        ),
        (of_two(3, 3, CHUNKS), 6),
    ],
)
def test_stages_that_send_parts_train_what_one_process_does(
    strategy: Strategy, layers: int
) -> None:
    model = model_of(strategy, replace(SHAPE, layers=layers, tied_embeddings=True))
    made = make_schedule(model, strategy)
    proves_and_trains(made, model, strategy)


def moved(made: Schedule, group: str, collective: str) -> list[int]:
    """Bytes that a rank of each stage sends so in a step."""
    return [
        sum(
            line.bytes
            for line in wire_bytes(made, program)
            if (line.group, line.collective) == (group, collective)
        )
        for program in made.programs
    ]


def test_each_tensor_rank_sends_its_part_and_gathers_the_others() -> None:
    strategy = of_two(4, 5)
    made = make_schedule(model_of(strategy), strategy)
    # 4 tokens of 8 elements in bf16 are 64 bytes, of which each of two ranks sends a half in each
    # of 5 micro-batches, and as much of what it received to the other rank. Those in the middle
    # send and receive both ways.
    assert moved(made, "pipeline", "send") == [5 * 32, 10 * 32, 10 * 32, 5 * 32]
    assert moved(made, "tensor", "all_gather") == [5 * 32, 10 * 32, 10 * 32, 5 * 32]


@pytest.mark.parametrize(
    ("strategy", "shape", "sent"),
    [
        (strategy_of(2, 2, PARTS), SHAPE, 64),
        # each rank has its own tokens: half of them, whole
        (of_two(2, 2, PARTS.but(sequence_parallel=True)), SHAPE, 32),
        # 3 tokens of 9 elements, which two ranks cannot cut
        (
            of_two(2, 2),
            Llama(
                layers=2,
                hidden_size=9,
                attention_heads=2,
                head_size=4,
                sequence_length=3,
                vocab_size=6,
            ),
            54,
        ),
    ],
)
def test_what_is_not_cut_is_sent_as_it_is(strategy: Strategy, shape: Llama, sent: int) -> None:
    model = model_of(strategy, shape)
    made = make_schedule(model, strategy)
    assert moved(made, "pipeline", "send") == [2 * sent, 2 * sent]
    options = strategy.options(Megatron).but(scatter_gather_tensors_in_pipeline=False)
    plain = make_schedule(model, strategy.but({"zero.emulate": options}))
    assert made.programs == plain.programs


def test_parts_are_gathered_once_the_host_has_waited_for_them() -> None:
    strategy = of_two(2, 2)
    made = make_schedule(model_of(strategy), strategy)
    for program in made.programs:
        gathers = [place for place, each in enumerate(program.step) if is_gather_of_parts(each)]
        assert len(gathers) == 2
        for place in gathers:
            before = [each for each in program.step[:place] if isinstance(each, HostWait | Free)]
            assert any(isinstance(each, HostWait) for each in before[-2:])
            freed = program.step[place + 1]
            assert isinstance(freed, Free)
            assert freed.buffer.endswith("/part")


def is_gather_of_parts(operation: object) -> bool:
    return isinstance(operation, AllGather) and operation.source.buffer.endswith("/part")


def test_ranks_that_all_send_the_first_part_are_found() -> None:
    strategy = of_two(2, 2)
    model = model_of(strategy)
    made = make_schedule(model, strategy)

    def first(source: View) -> View:
        return replace(source, axis=None)

    def changed(program: Program) -> Program:
        step = tuple(
            replace(each, source=first(each.source))
            if isinstance(each, Send)
            else replace(
                each,
                members=tuple(
                    replace(member, source=first(member.source))
                    if isinstance(member, Send)
                    else member
                    for member in each.members
                ),
            )
            if isinstance(each, Together)
            else each
            for each in program.step
        )
        return replace(program, step=step)

    found = check(replace(made, programs=tuple(map(changed, made.programs))), model)
    assert "values" in {each.invariant for each in found}


def test_messages_that_overlap_are_never_sent_in_parts() -> None:
    strategy = of_two(2, 2, PARTS.but(num_layers_per_virtual_pipeline_stage=1))
    with pytest.raises(ModelError, match="true needs overlap_p2p_comm = false"):
        make_schedule(model_of(strategy), strategy)
