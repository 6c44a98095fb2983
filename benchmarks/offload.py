"""How far reads, CPU Adam and writes overlap when optimizer states are in files.

    python -m benchmarks.offload [FOLDER]

One rank updates 24 million parameters in six sub-groups whose fp32 states (12 bytes a parameter,
read and written) are in a file in FOLDER. Three schedules take turns in one process: the whole
phase, pipelined; the same reads and writes without Adam; the same Adam without reads and writes.
The phase over the larger of the two others is what overlap leaves: 1 is perfect, and 1.15 is the
target where the file system sustains reads and writes at once and each thread has a core.
"""

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from tempfile import gettempdir

from torch import nn

from zsim.proof import check
from zsim.schedule.builder import BufferHandle, ScheduleBuilder
from zsim.schedule.operation import Action, Previous, Role
from zsim.schedule.schedule import Kind, Place, Pool, Schedule
from zsim.strategy.optimizer_rule import Adam
from zsim.trace.trace import Event
from zsim_torch.train import Option, train

GROUPS = 6
ELEMENTS = 4_000_000
SETS = 3
"""Sub-groups in slots at once: one is read, one updated, one written."""

STATES = ("master", "moment1", "moment2")
ROLES = (Role.MASTER, Role.MOMENT, Role.MOMENT)
STEPS = 3
ROUNDS = 3
TARGET = 1.15


@dataclass
class Phase:
    """The optimizer's phase of a step, with or without its files and its kernel."""

    files: bool = True
    adam: bool = True
    build: ScheduleBuilder = field(default_factory=lambda: ScheduleBuilder.of("phase", data=1))

    def __post_init__(self) -> None:
        build = self.build
        build.host_thread("adam")
        build.stream("read")
        build.stream("write")
        build.scalar("step", 0.0)
        slot = 4 * ELEMENTS
        build.pools += [
            Pool(name="host", place=Place.HOST),
            Pool(name="files", place=Place.NVME),
            Pool(
                name="slots",
                place=Place.HOST,
                slot_bytes=slot,
                capacity_bytes=SETS * len(STATES) * slot,
            ),
        ]
        self.gradient = build.buffer(
            "gradient", ELEMENTS, kind=Kind.GRADIENT, pool="host", home="adam", persistent=True
        )
        self.kept = [
            [
                build.buffer(
                    f"{state}{group}", ELEMENTS, pool="files", home="write", persistent=True
                )
                for state in STATES
            ]
            for group in range(GROUPS)
        ]

    def write(self) -> Schedule:
        """Set up files, then go through the sub-groups."""
        setup, step = self.build.setup, self.build.step
        setup.allocate(self.gradient, *(state for states in self.kept for state in states))
        setup.fill("gradient", self.gradient.all, 1e-3, stream="adam")
        zeros = self.build.buffer("zeros", ELEMENTS, pool="host", home="adam")
        setup.allocate(zeros)
        setup.fill("zeros", zeros.all, 0.0, stream="adam")
        written = [
            setup.write_file(
                f"write/{state.name}", zeros.all, state.all, stream="write", after=["setup/zeros"]
            )
            for states in self.kept
            for state in states
        ]
        setup.free(zeros, uses=written)
        step.set_scalar("step", "step", add=1.0)
        slots = {0: self.fetch(0)}
        for group in range(GROUPS):
            if group + 1 < GROUPS:
                slots[group + 1] = self.fetch(group + 1)
            self.update(group, slots.pop(group))
        return self.build.schedule()

    def fetch(self, group: int) -> list[BufferHandle]:
        """Read the states of a sub-group."""
        step = self.build.step
        slots = [
            self.build.buffer(
                f"slot{group % SETS}/{state}",
                ELEMENTS,
                kind=Kind.MOMENT if number else Kind.MASTER,
                pool="slots",
                home="read",
            )
            for number, state in enumerate(STATES)
        ]
        step.allocate(*slots)
        for kept, slot in zip(self.kept[group], slots, strict=True):
            if self.files:
                after = [Previous(f"step/write/{kept.name}")]
                step.read(f"read/{kept.name}", kept.all, slot.all, stream="read", after=after)
            else:
                step.fill(f"read/{kept.name}", slot[:1], 0.0, stream="adam")
        return slots

    def update(self, group: int, slots: list[BufferHandle]) -> None:
        """Update a sub-group, and write it back."""
        step, kept = self.build.step, self.kept[group]
        done = [f"step/read/{state.name}" for state in kept]
        if self.adam:
            updated = step.compute(
                f"update{group}",
                Action.UPDATE,
                [
                    *zip(ROLES, (slot.all for slot in slots), strict=True),
                    (Role.GRADIENT, self.gradient.all),
                ],
                rule=Adam(learning_rate=1e-3),
                scalars=["step"],
                stream="adam",
                after=done if self.files else [],
            )
            done = [updated]
        if self.files:
            done = [
                step.write_file(
                    f"write/{state.name}", slot.all, state.all, stream="write", after=done
                )
                for state, slot in zip(kept, slots, strict=True)
            ]
        for number, slot in enumerate(slots):
            step.free(slot, uses=[done[number]] if self.files else done)


def hidden(events: list[Event]) -> float:
    """Return the share of Adam's time in which a file is read or written as well."""
    files = sorted(
        (event.start_ps, event.end_ps) for event in events if event.stream in ("read", "write")
    )
    both = total = 0
    for event in events:
        if "update" in event.operation:
            total += event.end_ps - event.start_ps
            place = event.start_ps
            for start, end in files:
                low, high = max(start, place), min(end, event.end_ps)
                both += max(0, high - low)
                place = max(place, high)
    return both / total if total else 0.0


def measured(schedule: Schedule, folder: Path) -> Iterator[tuple[float, float]]:
    """Yield for each step but the first how long it takes, and how much of Adam is hidden."""
    option = Option(write_back=False, observe=False, offload_path=folder)
    trained = train(nn.Identity(), ("",), schedule, (), steps=STEPS, option=option)
    events: tuple[Event, ...] = trained.trace.ranks[0].events
    trained.close()
    for step in range(1, STEPS):
        own = [event for event in events if event.step == step]
        first = min(event.start_ps for event in own)
        yield (max(event.end_ps for event in own) - first) / 1e12, hidden(own)


def main() -> None:
    """Print the three times, and their ratio."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else gettempdir())
    kinds = {"phase": Phase(), "files": Phase(adam=False), "adam": Phase(files=False)}
    schedules = {name: kind.write() for name, kind in kinds.items()}
    wrong = [each for each in check(schedules["phase"]) if each.invariant in ("races", "lifetime")]
    assert not wrong, wrong
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in schedules}
    for _ in range(ROUNDS):
        for name, schedule in schedules.items():
            found[name] += measured(schedule, folder)
    middle = {name: median(time for time, _ in each) for name, each in found.items()}
    share = median(share for _, share in found["phase"])
    moved = 2 * 4 * len(STATES) * GROUPS * ELEMENTS
    print(f"{folder}, {os.cpu_count()} cores, {moved / 1e6:.0f} MB read and written")
    print(f"pipelined phase      {middle['phase']:.3f} s")
    rate = moved / middle["files"] / 1e9
    print(f"files alone          {middle['files']:.3f} s, {rate:.2f} GB/s")
    print(f"Adam alone           {middle['adam']:.3f} s")
    print(f"Adam beside files    {share:.0%} of its time")
    ratio = middle["phase"] / max(middle["files"], middle["adam"])
    print(f"phase over larger    {ratio:.2f} (target {TARGET})")


if __name__ == "__main__":
    main()
