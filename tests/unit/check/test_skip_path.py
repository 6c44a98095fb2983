"""What overflow skips: planted in zsim's own schedule with fp16, and in one by hand."""

from dataclasses import replace

from mutation import changed, edited, without

from zsim.architecture import GPT
from zsim.builder import ScheduleBuilder
from zsim.check import Finding, check
from zsim.gpt import gpt
from zsim.operation import Action, Branch, Copy, Fill, Operation, Role, View
from zsim.rule import SGD
from zsim.schedule import Kind, Schedule
from zsim.strategy import Precision, Strategy
from zsim.zero import schedule

SHAPE = GPT(layers=1, hidden_size=4, attention_heads=2, sequence_length=3, vocab_size=7)


def fp16() -> Schedule:
    model = gpt(SHAPE, micro_batch_size=1, precision=Precision.FP16)
    return schedule(model, Strategy(stage=1, data=4, precision=Precision.FP16))


def skip_path(made: Schedule) -> list[Finding]:
    return [each for each in check(made) if each.invariant == "skip path"]


def with_skipped(made: Schedule, *added: Operation) -> Schedule:
    """The schedule with more operations on the way that skips."""

    def edit(operation: Operation) -> tuple[Operation, ...]:
        if isinstance(operation, Branch):
            return (replace(operation, then=(*operation.then, *added)),)
        return (operation,)

    return edited(made, edit)


def test_the_way_that_skips_is_fine_as_it_is() -> None:
    assert skip_path(fp16()) == []


def test_parameters_that_are_written_though_the_step_is_skipped_are_found() -> None:
    made = fp16()
    cast = next(
        operation
        for operation in made.programs[0].by_id.values()
        if isinstance(operation, Copy) and operation.id.endswith("/cast")
    )
    wrong = replace(cast, id="step/skip/cast")
    (found,) = skip_path(with_skipped(made, wrong))
    assert found.operation == "step/skip/cast"
    assert "on the way that skips the update" in found.why


def test_a_loss_scale_that_does_not_fall_is_found() -> None:
    """DS 1599: the scale is handled otherwise in one stage than in the others."""
    (found,) = skip_path(without(fp16(), "step/skip/loss_scale"))
    assert found.operation == "step/branch" or found.operation.endswith("branch")
    assert "the next one overflows too" in found.why


def test_a_step_that_is_counted_though_it_is_skipped_is_found() -> None:
    made = fp16()
    count = made.programs[0].by_id["step/update/step"]
    (found,) = skip_path(with_skipped(made, replace(count, id="step/skip/step")))
    assert found.operation == "step/skip/step"


def test_a_step_that_is_not_counted_is_found_at_the_update_that_reads_it() -> None:
    (found,) = skip_path(without(fp16(), "step/update/step"))
    assert "reads step, which nothing counts" in found.why


def accumulating(*, cleared_on_skip: bool) -> Schedule:
    """A persistent gradient that every step adds to; DS 6550: it is cleared after an update."""
    build = ScheduleBuilder.of("accumulating", data=1)
    weight = build.buffer("weight", 4, kind=Kind.PARAMETER, persistent=True)
    gradient = build.buffer("gradient", 4, kind=Kind.GRADIENT, persistent=True)
    made, flag = build.buffer("made", 4, persistent=True), build.buffer("flag", 1, persistent=True)
    build.setup.allocate(weight, gradient, made, flag)
    for buffer in (weight, gradient, made, flag):
        build.setup.fill(buffer.name, buffer.all, 0.0)
    build.step.copy("add", made.all, gradient.all, accumulate=True)
    skips, goes_on = build.step.side("skip"), build.step.side("update")
    operands = [(Role.PARAMETER, weight.all), (Role.GRADIENT, gradient.all)]
    goes_on.compute("update", Action.UPDATE, operands, rule=SGD())
    goes_on.fill("clear", gradient.all, 0.0)
    if cleared_on_skip:
        skips.fill("clear", gradient.all, 0.0)
    build.step.branch("branch", flag.all, skips, goes_on, after=[])
    return build.schedule()


def test_what_is_cleared_after_an_update_is_cleared_after_a_skip() -> None:
    assert skip_path(accumulating(cleared_on_skip=True)) == []
    (found,) = skip_path(accumulating(cleared_on_skip=False))
    assert found.operation == "step/branch"
    assert found.witness == (
        "the way that updates: step/update/clear writes it",
        "the way that skips: nothing writes it",
    )


def test_a_branch_that_updates_on_both_ways_is_no_skip() -> None:
    made = accumulating(cleared_on_skip=False)
    (program,) = made.programs
    update = program.by_id["step/update/update"]
    assert skip_path(with_skipped(made, replace(update, id="step/skip/update"))) == []
    fill = Fill(id="x", stream="compute", target=View(buffer="made", size=4), value=0.0)
    assert skip_path(changed(made, "step/add", divisor=2)) != skip_path(with_skipped(made, fill))
