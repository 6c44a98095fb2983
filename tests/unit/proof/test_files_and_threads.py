"""Files on NVMe and threads of the host: ranges, slots and waits are proved as other memory is."""

import pytest

from zsim.proof import check
from zsim.schedule.builder import ScheduleBuilder
from zsim.schedule.operation import Copy, Free, FreeMode, HostWait, Previous, Write
from zsim.schedule.replace import replace
from zsim.schedule.schedule import Contract, FileBytes, Place, Pool, Schedule, ScheduleError


def swapped(
    *,
    waits: bool = True,
    awaits_write: bool = True,
    slots: int = 1,
    reads: int = 1,
    mode: FreeMode = FreeMode.WAITED,
) -> Schedule:
    """A state in a file that each step reads to a slot, changes on a thread, and writes back.

    What a thread made of it goes to the device, for which the host waits if it `waits`. A read of
    the next step is ordered after the write of this one if it `awaits_write`.
    """
    build = ScheduleBuilder.of("swapped", data=1)
    build.pools += [
        Pool(name="slots", place=Place.HOST, slot_bytes=16, capacity_bytes=slots * 16),
        Pool(name="files", place=Place.NVME),
    ]
    adam, reading, writing = build.host_thread("adam"), build.stream("read"), build.stream("write")
    here = build.buffer("here", 4, persistent=True)
    states = [
        build.buffer(f"state{each}", 4, pool="files", home=writing, persistent=True)
        for each in range(reads)
    ]
    slot_of = [build.buffer(f"slot{each}", 4, pool="slots", home=reading) for each in range(reads)]
    build.setup.allocate(here, *states)
    build.setup.fill("fill", here.all, 0.0)
    first = build.buffer("first", 4, pool="slots", home=adam)
    for state in states:
        build.setup.allocate(first)
        build.setup.fill(f"fill/{state.name}", first.all, 0.0, stream=adam)
        build.setup.write_file(
            f"write/{state.name}",
            first.all,
            state.all,
            stream=writing,
            after=[f"setup/fill/{state.name}"],
        )
        build.setup.free(first, uses=[f"setup/write/{state.name}"])
    build.step.allocate(*slot_of)
    for number, (state, slot) in enumerate(zip(states, slot_of, strict=True)):
        before = [Previous(f"step/write{number}")] if awaits_write else []
        build.step.read(f"read{number}", state.all, slot.all, stream=reading, after=before)
        build.step.copy(
            f"halve{number}",
            slot.all,
            slot.all,
            divisor=2,
            stream=adam,
            after=[f"step/read{number}"],
        )
    if waits:
        build.step.host_wait("wait", f"step/halve{reads - 1}")
    build.step.copy("upload", slot_of[-1].all, here.all, after=[f"step/halve{reads - 1}"])
    for number, (state, slot) in enumerate(zip(states, slot_of, strict=True)):
        build.step.write_file(
            f"write{number}", slot.all, state.all, stream=writing, after=[f"step/halve{number}"]
        )
        uses = [f"step/halve{number}", f"step/write{number}"]
        uses += ["step/upload"] if number == reads - 1 else []
        build.step.free(slot, uses=uses, mode=mode)
    return build.schedule()


def found(schedule: Schedule) -> list[str]:
    return [f"{each.invariant}: {each.operation} {each.why}" for each in check(schedule)]


def test_a_state_that_is_read_changed_and_written_back_is_proved() -> None:
    assert found(swapped()) == []
    assert found(swapped(slots=2, reads=2)) == []


def test_a_range_that_is_read_while_the_write_of_the_step_before_is_in_flight_is_a_race() -> None:
    deferred = swapped(awaits_write=False, mode=FreeMode.DEFERRED)
    assert any(each.startswith("races: step/read0") for each in found(deferred))


def test_a_device_that_waits_for_a_thread_needs_a_host_that_has_waited() -> None:
    assert found(swapped(waits=False)) == [
        "host_order: step/upload waits on stream compute for step/halve0 on adam, and the host has "
        "not waited for it"
    ]


def test_slots_that_run_out_are_found() -> None:
    (why,) = found(swapped(slots=1, reads=2))
    assert why.startswith("memory: step/slot1/allocate")
    assert why.endswith("pool slots may hold 32 bytes, its capacity is 16, 1 slots")


def test_a_slot_that_is_freed_while_it_is_written_to_the_file_is_found() -> None:
    made = swapped(slots=1)
    (program,) = made.programs
    step = tuple(
        replace(each, uses=("step/halve0", "step/upload")) if isinstance(each, Free) else each
        for each in program.step
    )
    assert any(
        each.startswith("lifetime: ")
        for each in found(replace(made, programs=(replace(program, step=step),)))
    )


def test_promised_bytes_of_files_are_compared_with_what_a_step_moves() -> None:
    kept = replace(swapped(), contract=Contract(file_bytes=FileBytes(read=16, written=16)))
    assert found(kept) == []
    broken = replace(swapped(), contract=Contract(file_bytes=FileBytes(read=16, written=12)))
    assert found(broken) == [
        "volume: files/writes a step writes 16 bytes of files, promised are 12"
    ]


@pytest.mark.parametrize(
    ("pool", "message"),
    [
        (Pool(name="slots", place=Place.HOST, slot_bytes=16), "must be a number of slots of 16"),
        (
            Pool(name="slots", place=Place.HOST, slot_bytes=16, capacity_bytes=24),
            "capacity_bytes 24 must be a number of slots of 16 bytes",
        ),
        (
            Pool(name="slots", place=Place.HOST, slot_bytes=8, capacity_bytes=16),
            "16 bytes, but a slot of pool slots has 8",
        ),
        (
            Pool(name="slots", slot_bytes=0, capacity_bytes=16),
            "slot_bytes 0 must be at least 1",
        ),
    ],
)
def test_pools_of_slots_that_cannot_be_are_refused(pool: Pool, message: str) -> None:
    made = swapped()
    with pytest.raises(ScheduleError, match=message):
        replace(made, pools=tuple(pool if each.name == "slots" else each for each in made.pools))


def test_a_write_that_does_not_end_in_a_file_is_refused() -> None:
    made = swapped()
    (program,) = made.programs
    step = tuple(
        replace(each, source=each.target, target=each.source) if isinstance(each, Write) else each
        for each in program.step
    )
    with pytest.raises(ScheduleError, match="step/write0: a Write from nvme to host"):
        replace(made, programs=(replace(program, step=step),))


def test_files_are_not_filled_and_handles_do_nothing_else() -> None:
    build = ScheduleBuilder.of("filled", data=1)
    build.pools.append(Pool(name="files", place=Place.NVME))
    state = build.buffer("state", 4, pool="files", persistent=True)
    build.setup.allocate(state)
    build.setup.fill("fill", state.all, 0.0)
    assert found(build.schedule())[0] == (
        "places: setup/fill is a Fill, and files are read by Read and written by Write, and "
        "touches state in nvme memory"
    )


def test_a_host_wait_for_the_step_before_is_a_wait() -> None:
    made = swapped(waits=False)
    (program,) = made.programs
    wait = HostWait(id="step/wait", operation=Previous("step/halve0"))
    step = tuple(
        replace(each, after=(Previous("step/halve0"),))
        if type(each) is Copy and each.id == "step/upload"
        else each
        for each in program.step
    )
    without = replace(made, programs=(replace(program, step=step),))
    assert any(each.startswith("host_order: step/upload") for each in found(without))
    waited = replace(made, programs=(replace(program, step=(wait, *step)),))
    assert not any(each.startswith("host_order") for each in found(waited))


def test_a_free_that_makes_a_device_wait_for_a_thread_is_found() -> None:
    made = swapped()
    (program,) = made.programs
    buffers = tuple(
        replace(each, home="compute") if each.name == "slot0" else each for each in program.buffers
    )
    ways = found(replace(made, programs=(replace(program, buffers=buffers),)))
    assert any(each.startswith("host_order: step/slot0/free") for each in ways)
