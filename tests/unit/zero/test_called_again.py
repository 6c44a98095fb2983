"""Units that a forward calls several times: one module in buckets, gathers, reductions."""

from dataclasses import replace

import pytest

from zsim.model.architecture import GPT
from zsim.model.architecture_error import ArchitectureError
from zsim.model.gpt import gpt
from zsim.model.model import Model, ModelError
from zsim.proof import check
from zsim.runtimes.registry import make_schedule
from zsim.schedule.operation import Action, AllGather, Compute, ReduceScatter, Role, walk
from zsim.schedule.schedule import Schedule
from zsim.strategy.activations import Activations, Checkpointing
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim_runtimes.fsdp1.options import FSDP1
from zsim_runtimes.fsdp2.options import FSDP2
from zsim_runtimes.nanotron.options import Nanotron

SHAPE = GPT(layers=4, hidden_size=4, attention_heads=2, sequence_length=2, vocab_size=5)
SHARED = replace(SHAPE, hidden_groups=2)


def model(shape: GPT = SHARED) -> Model:
    return gpt(shape, micro_batch_size=1)


def computes(made: Schedule, action: Action) -> list[Compute]:
    return [
        each
        for each in walk(made.programs[0].step)
        if isinstance(each, Compute) and each.action is action
    ]


def test_layers_of_a_group_share_their_parameters() -> None:
    found, apart = model(), model(SHAPE)
    names = [(unit.name, unit.module) for unit in found.units]
    assert names[1:-1] == [
        ("block0", ""),
        ("block1", "block0"),
        ("block2", ""),
        ("block3", "block2"),
    ]
    block = sum(parameter.elements for parameter in apart.units[1].parameters)
    assert found.parameter_count == apart.parameter_count - 2 * block
    assert found.forward_flops == apart.forward_flops


@pytest.mark.matrix(6)
@pytest.mark.parametrize("checkpointing", list(Checkpointing)[:2])
@pytest.mark.parametrize("stage", range(4))
def test_gradients_of_all_calls_are_added_up_and_reduced_once(
    stage: int, checkpointing: Checkpointing
) -> None:
    strategy = Strategy(
        parallel=Parallel(data=2),
        zero=Zero(stage=stage),
        activations=Activations(checkpointing=checkpointing),
    )
    made = make_schedule(model(), strategy)
    assert check(made, model()) == ()
    saved = [
        operand.view.buffer
        for each in computes(made, Action.BACKWARD)
        for operand in each.operands
        if operand.role is Role.SAVED
    ]
    assert len(set(saved)) == len(saved) == 5  # of the head and of four calls
    if stage == 3:
        once = [each for each in walk(made.programs[0].step) if isinstance(each, ReduceScatter)]
        gathers = [each for each in walk(made.programs[0].step) if isinstance(each, AllGather)]
        assert (len(once), len(gathers)) == (4, 8)  # embedding, two groups, head


@pytest.mark.parametrize("emulate", [FSDP1(), FSDP2(), Nanotron()])
def test_runtimes_that_wrap_modules_refuse_calls_by_name(emulate: FSDP1 | FSDP2 | Nanotron) -> None:
    stage = 0 if isinstance(emulate, Nanotron) else 3
    strategy = Strategy(parallel=Parallel(data=2), zero=Zero(stage=stage, emulate=emulate))
    with pytest.raises(ModelError, match="hidden_groups: block1 calls block0 again, which is not"):
        make_schedule(model(), strategy)


def test_groups_divide_layers() -> None:
    with pytest.raises(ArchitectureError, match="hidden_groups: 3 must divide layers 4"):
        replace(SHAPE, hidden_groups=3)


@pytest.mark.parametrize(
    ("module", "drops", "message"),
    [
        ("block9", False, "unit block1: calls block9, which no earlier unit is"),
        ("head", False, "unit block1: calls head, which no earlier unit is"),
        ("block0", True, "unit block1: differs from block0, which it calls again"),
    ],
)
def test_a_call_of_what_is_not_there_is_refused(module: str, message: str, *, drops: bool) -> None:
    found = model()
    units = list(found.units)
    units[2] = replace(units[2], module=module)
    if drops:
        (segment,) = units[2].segments
        fewer = replace(segment, parameters=segment.parameters[1:])
        units[2] = replace(units[2], parameters=units[2].parameters[1:], segments=(fewer,))
    with pytest.raises(ModelError, match=message):
        replace(found, units=tuple(units))
