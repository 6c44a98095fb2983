"""What a stage of a pipeline sends is placed on the next one as it was."""

from zsim.builder import Named, ScheduleBuilder
from zsim.check import Finding, check
from zsim.mesh import Span
from zsim.operation import Action, Operand, Role


def pipeline(*, sums: bool) -> list[Finding]:
    """A stage whose output is a summand over tensor ranks, and one that reads it."""
    build = ScheduleBuilder.of("pipeline", pipe=2, tensor=2)
    build.group("pipe", "pipe")
    build.group("tensor", "tensor")
    front = build.role("front", Span(axis="pipe", start=0, end=1))
    back = build.role("back", Span(axis="pipe", start=1, end=2))
    for role in (back, front):
        role.setup.allocate(role.buffer("x", 4, persistent=True))
        role.setup.allocate(role.buffer("y", 4, persistent=True))
    x, y = Named(front.buffers["x"]), Named(front.buffers["y"])
    front.step.compute("load", Action.LOAD, [(Role.OUTPUT, x.all)])
    output = Operand(role=Role.OUTPUT, view=y.all, partial=("tensor",))
    front.step.compute("forward", Action.FORWARD, [Operand(role=Role.INPUT, view=x.all), output])
    if sums:
        front.step.all_reduce("sum", "tensor", y.all)
    front.step.send("send", "pipe", y.all, 1)
    back.step.receive("receive", "pipe", x.all, -1)
    back.step.compute("forward", Action.FORWARD, [(Role.INPUT, x.all), (Role.OUTPUT, y.all)])
    return [each for each in check(build.schedule()) if each.invariant == "placement"]


def test_a_stage_reads_what_the_stage_before_sends() -> None:
    assert pipeline(sums=True) == []
    (found,) = pipeline(sums=False)
    assert (found.role, found.operation) == ("back", "step/forward")
    assert "computes with x, which is Partial over tensor" in found.why
