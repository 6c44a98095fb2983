"""Wrong backwards in two parts of FSDP2's pipelines: each is found."""

from collections.abc import Callable

import pytest
from fsdp2_pipelines import KEPT, SHAPE, model_of, strategy_of

from zsim.model.model import Model
from zsim.proof import check
from zsim.runtimes.registry import make_schedule
from zsim.schedule.operation import (
    Action,
    AllGather,
    Compute,
    Copy,
    Free,
    Operation,
    Receive,
    Role,
    Send,
)
from zsim.schedule.replace import replace
from zsim.schedule.schedule import Program
from zsim.strategy.strategy import Strategy
from zsim_runtimes.fsdp2.options import PipelineSchedule

SPLIT = KEPT.but(pipeline_schedule=PipelineSchedule.INTERLEAVED_ZERO_BUBBLE)


def model_in_parts(strategy: Strategy, layers: int = 4) -> Model:
    """A model as scenarios have it: its loss is a segment of its own."""
    return model_of(strategy, replace(SHAPE, layers=layers, execution=strategy.execution))


def edited(program: Program, edit: Callable[[list[Operation]], None]) -> Program:
    step = list(program.step)
    edit(step)
    return replace(program, step=tuple(step))


def parts(step: list[Operation], action: Action) -> list[int]:
    """Places of the computations of an action."""
    return [
        place
        for place, each in enumerate(step)
        if isinstance(each, Compute) and each.action is action
    ]


def dropped(step: list[Operation]) -> None:
    """A second part does not run, which nothing waits for."""
    timed = [each for each in step if isinstance(each, Compute | Send | Receive)]
    waited = {edge for each in timed for edge in each.after}
    places = parts(step, Action.BACKWARD_WEIGHT)
    del step[next(place for place in places if step[place].id not in waited)]


def too_early(step: list[Operation]) -> None:
    """A second part runs before its first."""
    weight = step.pop(parts(step, Action.BACKWARD_WEIGHT)[0])
    assert isinstance(weight, Compute)
    first = next(
        place
        for place, each in enumerate(step)
        if isinstance(each, Compute)
        and each.action is Action.BACKWARD_INPUT
        and (each.unit, each.micro_batch) == (weight.unit, weight.micro_batch)
    )
    step.insert(first, weight)


def of_another_micro_batch(role: Role) -> Callable[[list[Operation]], None]:
    """A second part reads what another micro-batch has in a role."""

    def edit(step: list[Operation]) -> None:
        one, other = _two_of_a_unit(step)
        theirs = next(each for each in other.operands if each.role is role)
        operands = tuple(theirs if each.role is role else each for each in one.operands)
        step[step.index(one)] = replace(one, operands=operands)

    return edit


def _two_of_a_unit(step: list[Operation]) -> tuple[Compute, Compute]:
    """Second parts of one unit, in two micro-batches whose first parts have both run."""
    found = [step[place] for place in parts(step, Action.BACKWARD_WEIGHT)]
    for one in found:
        for other in found:
            assert isinstance(one, Compute)
            assert isinstance(other, Compute)
            if one.unit == other.unit and other.micro_batch == one.micro_batch + 1:
                return one, other
    raise AssertionError(step)


def not_added(step: list[Operation]) -> None:
    """Gradients of weights take the place of those before."""
    for place, each in enumerate(step):
        if isinstance(each, Copy) and each.accumulate and "/gradient0@" in each.source.buffer:
            step[place] = replace(each, accumulate=False)
            return
    raise AssertionError(step)


def freed(step: list[Operation]) -> None:
    """Give back what a first part leaves before the second reads it."""
    place, one = next(
        (place, each)
        for place, each in enumerate(step)
        if isinstance(each, Free) and "/intermediate" in each.buffer
    )
    reader = parts(step, Action.BACKWARD_WEIGHT)[0]
    assert reader < place
    step.insert(reader, step.pop(place))
    assert one in step


@pytest.mark.matrix(15)
@pytest.mark.parametrize(
    "edit",
    [
        dropped,
        too_early,
        of_another_micro_batch(Role.INTERMEDIATE_GRADIENT),
        of_another_micro_batch(Role.SAVED),
        of_another_micro_batch(Role.GRADIENT),
        not_added,
        freed,
    ],
)
@pytest.mark.parametrize("tensor", [1, 2])
def test_a_wrong_second_part_is_found(edit: Callable[[list[Operation]], None], tensor: int) -> None:
    strategy = strategy_of(2, 4, SPLIT).but({"parallel.tensor": tensor})
    model = model_in_parts(strategy)
    made = make_schedule(model, strategy)
    first, last = made.programs
    wrong = replace(made, programs=(first, edited(last, edit)))
    assert check(wrong, model)


@pytest.mark.one_commit_in(6)
def test_a_gradient_that_its_first_part_reads_in_part_is_found() -> None:
    strategy = strategy_of(2, 4, SPLIT).but({"parallel.tensor": 2})
    model = model_in_parts(strategy)
    made = make_schedule(model, strategy)
    first, last = made.programs

    def edit(step: list[Operation]) -> None:
        """The gradient of what a layer made is not gathered."""
        gathers = [
            each
            for each in step
            if isinstance(each, AllGather) and each.target.buffer.endswith("/gradient/whole")
        ]
        step.remove(gathers[1])

    assert check(replace(made, programs=(first, edited(last, edit))), model)


def test_a_first_part_that_reads_another_gradient_is_found() -> None:
    strategy = strategy_of(2, 4, SPLIT)
    model = model_in_parts(strategy, layers=6)
    made = make_schedule(model, strategy)
    first, last = made.programs

    def edit(step: list[Operation]) -> None:
        """A unit reads the gradient of its output in the next micro-batch."""
        found = [each for each in step if isinstance(each, Compute)]
        inputs = [each for each in found if each.action is Action.BACKWARD_INPUT]
        one = next(each for each in inputs if each.unit == "block2")
        later = next(each for each in inputs if each.unit == "block2" and each.micro_batch == 1)
        theirs = next(each for each in later.operands if each.role is Role.OUTPUT_GRADIENT)
        operands = tuple(
            theirs if each.role is Role.OUTPUT_GRADIENT else each for each in one.operands
        )
        step[step.index(one)] = replace(one, operands=operands)

    assert check(replace(made, programs=(first, edited(last, edit))), model)
