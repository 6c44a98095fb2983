"""What may tell one micro-batch from another alike has the whole schedule run."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from equal_micro_batches import (
    LAST,
    MICRO_BATCHES,
    OTHER,
    SHAPE,
    SPARE,
    STRATEGY,
    accumulating,
    fewer,
    made,
    number_of,
    numbered_backwards,
    planted,
    renamed,
    stepping,
    sum_of,
)
from faults.of_schedules.registry import MICRO_BATCHES as FAULTS
from faults.of_schedules.registry import ScheduleFault
from faults.of_schedules.wrong_micro_batches import WRONG, numbered, parameter_of
from faults.schedules import with_program
from fitting import fitting

from zsim.dtype import DType
from zsim.model.model import Model
from zsim.model.pipeline_stages import in_blocks
from zsim.proof import values
from zsim.proof.context import Context
from zsim.proof.execution.fewer_micro_batches import with_fewer
from zsim.proof.execution.inferred_model import training_of
from zsim.proof.execution.micro_batch_list import counted_fields, identity
from zsim.proof.execution.repetition import UNUSED
from zsim.proof.families import ProofStage, of_stage
from zsim.runtimes.registry import make_schedule
from zsim.schedule.operation import (
    Action,
    Allocate,
    AllReduce,
    Compute,
    Copy,
    Fill,
    Free,
    Operand,
    Operation,
    Role,
    Send,
    SetScalar,
    View,
)
from zsim.schedule.replace import replace
from zsim.schedule.schedule import Program, Schedule
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim_runtimes.megatron.options import Megatron

Order = Callable[[Schedule], Schedule]
ORDERS: list[Order] = [lambda schedule: schedule, numbered_backwards]


def need_wrong(schedule: Schedule, model: Model) -> None:
    """Check that values alone show what is wrong, be it in the whole schedule or in a part."""
    context = Context.of(schedule, model)
    assert not any(each.examine(context) for each in of_stage(ProofStage.ORDER))
    assert values.shown(context).findings


@pytest.mark.parametrize("order", ORDERS)
def test_a_schedule_of_two_stages_is_proved_by_two_micro_batches(order: Order) -> None:
    schedule, model = order(made()[0]), made()[1]
    found = fewer(schedule)
    assert found is not None
    assert found.training.micro_batches == 2
    assert found.training.divisor == MICRO_BATCHES
    names = {number_of(each) for program in found.schedule.programs for each in program.step}
    assert names == {-1, 0, 1}
    assert not values.shown(Context.of(schedule, model)).findings


@pytest.mark.matrix(8)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_what_only_some_micro_batches_do_is_found(fault: ScheduleFault, order: Order) -> None:
    schedule, model = made()
    (mutant,) = fault.mutants(schedule)
    need_wrong(order(mutant.made), model)


@pytest.mark.matrix(4)
@pytest.mark.parametrize("order", ORDERS)
def test_what_another_stage_does_is_found(order: Order) -> None:
    need_wrong(order(planted(WRONG["left out"], 1)), made()[1])


@pytest.mark.matrix(4)
@pytest.mark.parametrize("order", ORDERS)
def test_a_micro_batch_that_computes_one_that_is_left_out_is_found(order: Order) -> None:
    schedule, model = made()
    need_wrong(stepping(order(schedule), numbered(5, 2)), model)


def test_operations_of_no_micro_batch_that_compute_one_that_is_left_out_are_found() -> None:
    schedule, model = accumulating()
    kept = 3  # the first, which sets sums, and two that are alike
    wrong = stepping(schedule, numbered(LAST, kept))
    need_wrong(renamed(wrong, lambda path: path.replace(f"/mb{LAST}/", "/again/")), model)


def computed(action: Action, *operands: Operand) -> Compute:
    return Compute(id="step/more", stream="compute", action=action, operands=operands)


def with_setup(schedule: Schedule, *operations: Operation) -> Schedule:
    program = schedule.programs[0]
    return with_program(schedule, replace(program, setup=(*program.setup, *operations)))


def spare(size: int = 1) -> View:
    return View(buffer=SPARE, size=size)


def with_each_sum(
    program: Program,
    make: Callable[[str], list[Operation]],
    buffer: Callable[[int], str] = lambda _: SPARE,
) -> list[Operation]:
    """Put operations before the first sum of each micro-batch, in memory of its own."""
    step: list[Operation] = []
    seen: set[int] = set()
    for each in program.step:
        number = number_of(each)
        if isinstance(each, Copy) and number not in {-1, *seen}:
            seen.add(number)
            name = f"step/backward/mb{number}/more"
            step += [Allocate(id=f"{name}/allocate", buffer=buffer(number)), *make(name)]
            step.append(Free(id=f"{name}/free", buffer=buffer(number)))
        step.append(each)
    return step


def reduced(view: View, name: str) -> AllReduce:
    """A sum over the stages, which run other programs."""
    return AllReduce(
        id=f"{name}/reduce",
        stream="communication",
        group="pipeline",
        source=view,
        target=view,
        wire=DType.BF16,
        accumulate=DType.FP32,
    )


def everywhere(plant: Callable[[Program], list[Operation]]) -> Schedule:
    """The schedule in which both roles do something."""
    first = planted(plant, 0)
    return with_program(first, planted(plant, 1).programs[1])


def of_no_use(program: Program) -> list[Operation]:
    """Sums over the stages of what nothing reads."""

    def make(name: str) -> list[Operation]:
        fill = Fill(id=f"{name}/fill", stream="compute", target=spare(), value=1.0)
        return [fill, reduced(spare(), name)]

    return with_each_sum(program, make)


def of_no_use_in_another_order(program: Program) -> list[Operation]:
    """The same, of which the ids of two micro-batches are exchanged on the first stage."""
    step = of_no_use(program)
    if program.role != "stage0":
        return step
    names = {4: "step/backward/mb5/more", 5: "step/backward/mb4/more"}
    return [
        replace(each, id=each.id.replace(f"step/backward/mb{number}/more", names[number]))
        if (number := number_of(each)) in names and "/more" in each.id
        else each
        for each in step
    ]


def of_gradients(program: Program) -> list[Operation]:
    """Sums over the stages of gradients, which are added to what they are made of."""
    size = 4

    def make(name: str) -> list[Operation]:
        gradient = next(
            each.view
            for operation in program.step
            if isinstance(operation, Compute) and number_of(operation) == 4
            for each in operation.operands
            if each.role is Role.GRADIENT and each.view.size >= size
        )
        target = replace(sum_of(program), start=0, size=size)
        return [
            Copy(
                id=f"{name}/copy",
                stream="compute",
                source=replace(gradient, size=size),
                target=spare(size),
            ),
            reduced(spare(size), name),
            Copy(
                id=f"{name}/add",
                stream="compute",
                source=spare(size),
                target=target,
                accumulate=True,
            ),
        ]

    return with_each_sum(program, make)


def test_micro_batches_that_meet_in_collectives_are_told_apart() -> None:
    assert fewer(everywhere(of_no_use)) is not None


def of_another(program: Program) -> list[Operation]:
    """Every other micro-batch reads memory that those take which would be left out beside them."""

    def make(name: str) -> list[Operation]:
        number = int(name.partition("/mb")[2].partition("/")[0])
        own = View(buffer=buffer(number), size=1)
        if number % 2:
            return [Copy(id=f"{name}/read", stream="compute", source=spare(), target=own)]
        return [Fill(id=f"{name}/fill", stream="compute", target=own, value=1.0)]

    def buffer(number: int) -> str:
        return SPARE if number in (4, 6) else OTHER

    return with_each_sum(program, make, buffer)


def of_sums_in_memory(*kinds: type[Allocate | Free]) -> Callable[[Program], list[Operation]]:
    """Gradients go into memory that the first one takes, or gives back, between two of them."""

    def plant(program: Program) -> list[Operation]:
        step: list[Operation] = []
        for each in program.step:
            number = number_of(each)
            if isinstance(each, Copy) and number > 0:
                for kind in kinds if number == 4 else ():
                    name = f"step/backward/mb0/{kind.__name__}/{each.id}"
                    step.append(kind(id=name, buffer=SPARE))
                target = spare(each.source.size)
                step.append(replace(each, id=f"{each.id}/more", target=target, by_parameter=False))
            step.append(each)
        return step

    return plant


def of_parameters_that_are_added_to(program: Program) -> list[Operation]:
    """The first one adds to a parameter."""
    place, view = parameter_of(program, 5)
    more = Copy(
        id="step/forward/mb0/add",
        stream="compute",
        source=spare(view.size),
        target=view,
        accumulate=True,
    )
    return [*program.step[:place], more, *program.step[place:]]


def counted(program: Program) -> list[Operation]:
    """A number of the host that changes on the way."""
    step = list(program.step)
    place = next(n for n, each in enumerate(step) if number_of(each) == 5)
    return [*step[:place], SetScalar(id="step/count", scalar="step", add=1.0), *step[place:]]


def kept_by_all(schedule: Schedule) -> Schedule:
    """The schedule in which the memory of a micro-batch outlives the step."""
    program = schedule.programs[0]
    own = next(each.buffer for each in program.step if isinstance(each, Allocate))
    kept = replace(program, persistent=(*program.persistent, own))
    return with_program(schedule, kept)


NOT_KNOWN: dict[str, Callable[[], Schedule]] = {
    "a number of the host that changes on the way": lambda: planted(counted, 0),
    "a segment in setup": lambda: with_setup(
        made()[0],
        Allocate(id="setup/allocate", buffer="batch"),
        computed(Action.LOAD, Operand(role=Role.OUTPUT, view=View(buffer="batch", size=3))),
        Free(id="setup/free", buffer="batch"),
    ),
    "a test for overflow": lambda: with_setup(
        planted(lambda program: list(program.step), 0),
        Allocate(id="setup/allocate", buffer=SPARE),
        computed(
            Action.FINITE,
            Operand(role=Role.GRADIENT, view=sum_of(made()[0].programs[0])),
            Operand(role=Role.OUTPUT, view=spare()),
        ),
        Free(id="setup/free", buffer=SPARE),
    ),
    "collectives in another order": lambda: everywhere(of_no_use_in_another_order),
    "gradients of other stages": lambda: everywhere(of_gradients),
    "sums that are taken on the way": lambda: planted(of_sums_in_memory(Allocate), 0),
    "sums that are taken and given back": lambda: planted(of_sums_in_memory(Allocate, Free), 0),
    "sums that are given back on the way": lambda: planted(of_sums_in_memory(Free), 0),
    "parameters that are added to": lambda: planted(of_parameters_that_are_added_to, 0),
    "memory of another that is left out": lambda: planted(of_another, 0),
    "memory that outlives the step": lambda: kept_by_all(made()[0]),
}


@pytest.mark.parametrize("name", NOT_KNOWN)
def test_what_is_not_known_to_be_alike_has_the_whole_run(name: str) -> None:
    assert fewer(NOT_KNOWN[name]()) is None


def test_delayed_updates_have_the_whole_run() -> None:
    schedule, _ = made()
    training = training_of(schedule)
    assert training is not None
    assert with_fewer(schedule, replace(training, warm_up=2)) is None


@cache
def padded() -> Schedule:
    """Stages whose parameters begin at multiples of 64 elements."""
    strategy = Strategy(
        parallel=Parallel(pipeline=2), zero=Zero(stage=1, emulate=Megatron()), train=STRATEGY.train
    )
    return make_schedule(in_blocks(fitting(SHAPE, strategy)), strategy)


def test_a_sum_in_padding_that_others_set_to_zero_has_the_whole_run() -> None:
    schedule = padded()
    program = schedule.programs[0]
    place, copy = next(
        (place, each)
        for place, each in enumerate(program.step)
        if isinstance(each, Copy) and number_of(each) == 0
    )
    layout = schedule.layout_by_name[program.by_name[copy.target.buffer].layout or ""]
    end = min(each.end for each in layout.pieces)
    more = replace(
        copy,
        id=f"{copy.id}/more",
        source=replace(copy.source, size=1),
        target=replace(copy.target, start=end, size=1),
        by_parameter=False,
    )
    step = (*program.step[:place], more, *program.step[place:])

    assert fewer(schedule) is not None
    assert fewer(with_program(schedule, replace(program, step=step))) is None


def test_ids_with_more_digits_than_a_number_may_have_are_of_no_micro_batch() -> None:
    schedule, model = made()
    many = renamed(schedule, lambda path: path.replace("/mb5/", f"/mb{'5' * 5000}/"))
    assert fewer(many) is None
    assert not values.shown(Context.of(many, model)).findings


def test_each_field_of_an_operation_that_numbers_depend_on_is_compared() -> None:
    apart = {*UNUSED, "micro_batch", "operands"}
    assert {*Compute.__struct_fields__} - apart == {*counted_fields(Compute)}
    view = View(buffer=SPARE, size=1)
    compute = computed(Action.FORWARD)
    copy = Copy(id="copy", stream="compute", source=view, target=view)
    send = Send(id="send", stream="p2p", group="pipeline", offset=1, source=view, wire=DType.BF16)
    others: dict[Operation, list[dict[str, Any]]] = {
        send: [
            {"group": "data"},
            {"offset": 2},
            {"source": replace(view, size=2)},
            {"wire": DType.FP32},
        ],
        compute: [
            {"action": Action.RECOMPUTE},
            {"unit": "other"},
            {"segment": 1},
            {"scalars": ("step",)},
            {"rule": STRATEGY.train.optimizer},
            {"operands": (Operand(role=Role.INPUT, view=view),)},
        ],
        copy: [
            {"source": replace(view, size=2)},
            {"target": replace(view, size=2)},
            {"accumulate": True},
            {"divisor": 2},
            {"by_parameter": True},
        ],
    }
    for operation, changes in others.items():
        kind: Any = type(operation)
        assert {name for change in changes for name in change} >= set(counted_fields(kind))
        for change in changes:
            assert identity([operation], 0) != identity([replace(operation, **change)], 0)
