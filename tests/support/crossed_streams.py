"""A step by hand whose operations and frees wait for two other streams, and for steps before."""

from zsim.schedule.builder import ScheduleBuilder
from zsim.schedule.operation import FreeMode, Previous
from zsim.schedule.schedule import Schedule

ELEMENTS = 512


def crossed() -> Schedule:
    """Two streams fill, a third one adds both up; scratch memory of the first is read by both."""
    build = ScheduleBuilder.of("crossed", data=1)
    other = build.stream("other")
    one, two, total = (
        build.buffer(name, ELEMENTS, home=home, persistent=True)
        for name, home in (("one", "compute"), ("two", "communication"), ("total", other))
    )
    build.setup.allocate(one, two, total)
    for buffer, home in ((one, "compute"), (two, "communication"), (total, other)):
        build.setup.fill(buffer.name, buffer.all, 0.0, stream=home)
    step, ends = build.step, [Previous("step/end")]
    first = step.fill("one", one.all, 1.0, stream="compute", after=ends)
    second = step.fill("two", two.all, 2.0, stream="communication", after=ends)
    step.copy("begin", one.all, total.all, stream=other, after=[first, second])
    step.copy("sum", two.all, total.all, stream=other, after=[], accumulate=True)
    scratch = build.buffer("scratch", ELEMENTS, home="compute")
    again = build.buffer("again", ELEMENTS, home="compute")
    step.allocate(scratch)
    made = step.fill("scratch", scratch.all, 3.0, stream="compute")
    uses = [
        step.copy("to two", scratch.all, two.all, stream="communication", after=[made, "step/sum"]),
        step.copy("to total", scratch.all, total.all, stream=other, after=[made]),
    ]
    step.free(scratch, mode=FreeMode.DEFERRED, uses=uses)
    step.host_wait("first use", uses[0])
    step.allocate(again)
    step.fill("again", again.all, 4.0, stream="compute")
    step.free(again)
    step.host_wait("second use", uses[1])  # or the host never learns that memory is free
    waited = build.buffer("waited", ELEMENTS, home="compute")
    step.allocate(waited)
    made = step.fill("waited", waited.all, 5.0, stream="compute")
    use = step.copy("add", waited.all, total.all, stream=other, after=[made], accumulate=True)
    step.free(waited, uses=[use])
    spread = step.copy("spread", total.all, two.all, stream="communication", after=[use])
    step.copy("end", one.all, total.all, stream=other, after=[spread])
    return build.schedule()
