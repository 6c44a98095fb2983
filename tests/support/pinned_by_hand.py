"""A step by hand that takes host memory and a range of a file again while a thread uses them."""

from zsim.schedule.builder import ScheduleBuilder
from zsim.schedule.operation import Previous
from zsim.schedule.schedule import Place, Pool, Schedule

ELEMENTS = 1024
FIRST, SECOND = 1.0, 2.0


def pinned() -> Schedule:
    """Threads write a slot to a file, and another slot, in the same memory, is filled meanwhile.

    The range of a file is read into memory while another buffer takes it; then the device reads
    that memory. `kept`, `held` and `seen` have the number of the first slot and the first range.
    """
    build = ScheduleBuilder.of("pinned", data=1)
    filler, other = build.host_thread("filler"), build.host_thread("other")
    writer, reader = build.stream("writer"), build.stream("reader")
    size = 4 * ELEMENTS
    build.pools += [
        Pool(name="slots", place=Place.HOST, slot_bytes=size, capacity_bytes=size),
        Pool(name="host", place=Place.HOST),
        Pool(name="files", place=Place.NVME),
        Pool(name="ranges", place=Place.NVME),
    ]
    kept = build.buffer("kept", ELEMENTS, pool="files", home=writer, persistent=True)
    held = build.buffer("held", ELEMENTS, pool="host", home=reader, persistent=True)
    seen = build.buffer("seen", ELEMENTS, home="compute", persistent=True)
    build.setup.allocate(kept, held, seen)
    step = build.step
    one = build.buffer("one", ELEMENTS, pool="slots", home=filler)
    step.allocate(one)
    made = step.fill("one", one.all, FIRST, stream=filler)
    written = step.write_file("write", one.all, kept.all, stream=writer, after=[made])
    step.free(one, uses=[written])
    two = build.buffer("two", ELEMENTS, pool="slots", home=other)
    step.allocate(two)
    step.fill("two", two.all, SECOND, stream=other)
    step.free(two)
    source = build.buffer("source", ELEMENTS, pool="host", home=filler)
    again = build.buffer("again", ELEMENTS, pool="host", home=other)
    step.allocate(source, again)
    made = step.fill("source", source.all, FIRST, stream=filler)
    remade = step.fill("again", again.all, SECOND, stream=other)
    first = build.buffer("first range", ELEMENTS, pool="ranges", home=filler)
    step.allocate(first)
    written = step.write_file("fill range", source.all, first.all, stream=writer, after=[made])
    read = step.read("read", first.all, held.all, stream=reader, after=[written])
    step.free(first, uses=[written, read])
    second = build.buffer("second range", ELEMENTS, pool="ranges", home=other)
    step.allocate(second)
    last = step.write_file("take range", again.all, second.all, stream=writer, after=[remade])
    step.free(second, uses=[last])
    step.free(source, uses=[written])
    step.free(again, uses=[last])
    step.host_wait("wait", read)
    step.copy("see", held.all, seen.all, stream="compute")
    return build.schedule()


def lent() -> Schedule:
    """A slot of pinned memory that the device reads is freed, and a thread fills it at once."""
    build = ScheduleBuilder.of("lent", data=1)
    filler, other = build.host_thread("filler"), build.host_thread("other")
    size = 4 * ELEMENTS
    build.pools.append(
        Pool(name="slots", place=Place.HOST, slot_bytes=size, capacity_bytes=size),
    )
    seen = build.buffer("seen", ELEMENTS, home="compute", persistent=True)
    build.setup.allocate(seen)
    step = build.step
    one = build.buffer("one", ELEMENTS, pool="slots", home="compute")
    step.allocate(one)
    made = step.fill("one", one.all, FIRST, stream=filler, after=[Previous("step/see")])
    step.host_wait("wait", made)
    step.copy("see", one.all, seen.all, stream="compute", after=[made])
    step.free(one)
    two = build.buffer("two", ELEMENTS, pool="slots", home=other)
    step.allocate(two)
    step.fill("two", two.all, SECOND, stream=other)
    step.free(two)
    return build.schedule()
