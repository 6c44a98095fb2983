"""When it gives back what it has taken tells no micro-batch from another, if it is not touched."""

from collections.abc import Callable

import pytest
from equal_micro_batches import SHAPE, STRATEGY, fewer, made, number_of, planted
from fitting import fitting

from zsim.model.pipeline_stages import in_blocks
from zsim.proof import values
from zsim.proof.context import Context
from zsim.runtimes.registry import make_schedule
from zsim.schedule.operation import Allocate, Compute, Free, Operation
from zsim.schedule.replace import replace
from zsim.schedule.schedule import Program
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim_runtimes.megatron.options import Megatron

ONE = 5
"""A micro-batch that is left out."""


def place_of_free(program: Program) -> int:
    """Return the place of a free of what the first segment of a micro-batch makes."""
    return next(
        place
        for place, each in enumerate(program.step)
        if isinstance(each, Free) and number_of(each) == ONE
    )


def later(program: Program) -> list[Operation]:
    """One micro-batch gives back at its end."""
    step = list(program.step)
    free = step.pop(place_of_free(program))
    last = max(place for place, each in enumerate(step) if number_of(each) == ONE)
    return [*step[: last + 1], free, *step[last + 1 :]]


def before_its_last_use(program: Program) -> list[Operation]:
    """One micro-batch gives back before it computes with it."""
    step = list(program.step)
    place = place_of_free(program)
    free = step.pop(place)
    assert isinstance(free, Free)
    used = max(
        number
        for number, each in enumerate(step[:place])
        if isinstance(each, Compute)
        and any(operand.view.buffer == free.buffer for operand in each.operands)
    )
    return [*step[:used], replace(free, uses=()), *step[used:]]


def never(program: Program) -> list[Operation]:
    """One micro-batch gives back nothing of a buffer."""
    place = place_of_free(program)
    return [each for number, each in enumerate(program.step) if number != place]


def twice(program: Program) -> list[Operation]:
    """One micro-batch gives back twice."""
    place = place_of_free(program)
    free = program.step[place]
    return [*program.step[:place], replace(free, id=f"{free.id}/again"), *program.step[place:]]


def taken_twice(program: Program) -> list[Operation]:
    """One micro-batch takes twice, and gives back twice, behind the last use."""
    step = list(program.step)
    place = place_of_free(program)
    free = step[place]
    assert isinstance(free, Free)
    taken = next(
        number
        for number, each in enumerate(step)
        if isinstance(each, Allocate) and each.buffer == free.buffer and number_of(each) == ONE
    )
    take, give = (replace(each, id=f"{each.id}/again") for each in (step[taken], free))
    return [*step[: taken + 1], take, *step[taken + 1 : place], give, *step[place:]]


@pytest.mark.parametrize("role", [0, 1])
def test_one_that_gives_back_later_is_left_out_all_the_same(role: int) -> None:
    schedule, model = planted(later, role), made()[1]
    found = fewer(schedule)
    assert found is not None
    assert found.training.micro_batches == 2
    assert not values.shown(Context.of(schedule, model)).findings


@pytest.mark.parametrize("role", [0, 1])
@pytest.mark.parametrize("plant", [before_its_last_use, never, twice, taken_twice])
def test_one_that_touches_what_it_gave_back_or_keeps_it_is_told_apart(
    plant: Callable[[Program], list[Operation]], role: int
) -> None:
    found = fewer(planted(plant, role))
    assert found is None or found.training.micro_batches > 2


@pytest.mark.matrix(6)
@pytest.mark.parametrize("stages", [2, 4])
def test_interleaved_stages_are_proved_by_two(stages: int) -> None:
    megatron = Megatron(num_layers_per_virtual_pipeline_stage=1)
    parallel, zero = Parallel(pipeline=stages), Zero(stage=1, emulate=megatron)
    strategy = Strategy(parallel=parallel, zero=zero, train=STRATEGY.train)
    model = in_blocks(fitting(replace(SHAPE, layers=2 * stages), strategy))
    found = fewer(make_schedule(model, strategy))
    assert found is not None
    assert found.training.micro_batches == 2
