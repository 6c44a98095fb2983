"""Lists of requests with the statistics that PyTorch's own allocator has after them.

    python tests/support/allocator_record.py [SERVE]

draws lists, has each served by PyTorch, and writes `tests/recorded/caching_allocator.json`. SERVE
is the program that `stand_in_cuda/build.sh` builds; without it, they are served on a CUDA device.
The lists are drawn from a seed, or are what ranks of zsim's own schedules ask for.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from drawn_requests import EDGES, MIB, read, written
from memory_requests import Empty, Finish, Give, Request, Take, Use

from zsim.memory import memory_ledger
from zsim.memory.settings import AllocatorSettings
from zsim.model.architecture import GPT
from zsim.model.gpt import gpt
from zsim.runtimes.registry import make_schedule
from zsim.strategy.activations import Activations, Checkpointing
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import Train

RECORDED = Path(__file__).parents[1] / "recorded" / "caching_allocator.json"
LARGE, TIGHT = 64 << 30, 400 * MIB
SETTINGS = {
    "": AllocatorSettings(),
    "expandable_segments:True": AllocatorSettings(expandable_segments=True),
    "max_split_size_mb:32": AllocatorSettings(max_split_bytes=32 * MIB),
    "max_split_size_mb:24,max_non_split_rounding_mb:30": AllocatorSettings(
        max_split_bytes=24 * MIB, max_non_split_rounding_bytes=30 * MIB
    ),
    "roundup_power2_divisions:4": AllocatorSettings(roundup_power2_divisions=4),
    "garbage_collection_threshold:0.4": AllocatorSettings(garbage_collection_threshold=0.4),
}
"""Settings by how PYTORCH_ALLOC_CONF says them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One list: what is asked under which settings, and what PyTorch then says."""

    of: str
    settings: str
    capacity_bytes: int
    requests: tuple[str, ...]
    figures: dict[str, int]

    @property
    def asked(self) -> list[Request]:
        return read(self.requests)


def stored() -> tuple[str, list[Record]]:
    """Which PyTorch served the stored lists, on what; and the lists."""
    found = json.loads(RECORDED.read_text("utf-8"))
    lists = [
        Record(**each | {"requests": tuple(each["requests"].split(", "))})
        for each in found["lists"]
    ]
    return found["by"], lists


def lists() -> Iterator[Record]:
    """What is to be served; nothing has been."""
    generator = np.random.default_rng(2026)
    for settings in SETTINGS:
        for number, capacity in enumerate((LARGE, LARGE, TIGHT, TIGHT // 4)):
            yield Record(
                of=f"drawn {number}",
                settings=settings,
                capacity_bytes=capacity,
                requests=tuple(written(drawn(generator, 100))),
                figures={},
            )
    for number in range(10):
        yield Record(
            of=f"alike {number}",
            settings="",
            capacity_bytes=LARGE,
            requests=tuple(written(alike(generator, 100))),
            figures={},
        )
    for stage in (0, 2, 3):
        for settings in ("", "expandable_segments:True"):
            yield Record(
                of=f"stage {stage}",
                settings=settings,
                capacity_bytes=LARGE,
                requests=tuple(written(scheduled(stage))),
                figures={},
            )


def drawn(generator: np.random.Generator, count: int) -> list[Request]:
    """Requests of all sizes, on three streams; one of them uses what others have allocated."""
    found: list[Request] = []
    live: list[str] = []
    some = [int(2 ** generator.uniform(5, 26)) for _ in range(6)]
    for number in range(count):
        draw = generator.random()
        if draw < 0.04:
            found.append(Finish(str(generator.integers(3))))
        elif draw < 0.05:
            found.append(Empty())
        elif live and (draw < 0.45 or len(live) > 12):
            name = live.pop(int(generator.integers(len(live))))
            if generator.random() < 0.3:
                found.append(Use(name, "1"))
            found.append(Give(name))
        else:
            sizes = (generator.choice(some), generator.choice(EDGES), 2 ** generator.uniform(5, 26))
            size = int(sizes[int(generator.choice(3, p=(0.5, 0.1, 0.4)))])
            live.append(f"b{number}")
            found.append(Take(live[-1], size, str(generator.integers(3))))
    return found


def alike(generator: np.random.Generator, count: int) -> list[Request]:
    """Requests of three sizes: often several free blocks are equal."""
    found: list[Request] = []
    live: list[str] = []
    sizes = generator.integers(2 * MIB, 9 * MIB, 3)
    for number in range(count):
        if live and (generator.random() < 0.48 or len(live) > 12):
            found.append(Give(live.pop(int(generator.integers(len(live))))))
        else:
            live.append(f"b{number}")
            found.append(Take(live[-1], int(generator.choice(sizes)), "0"))
    return found


def scheduled(stage: int) -> list[Request]:
    """What the schedule of a small GPT asks for in two steps."""
    shape = GPT(layers=3, hidden_size=512, attention_heads=8, sequence_length=256, vocab_size=5000)
    strategy = Strategy(
        parallel=Parallel(data=4),
        zero=Zero(stage=stage, bucket_elements=1_000_000),
        activations=Activations(
            checkpointing=Checkpointing.FULL if stage == 3 else Checkpointing.NONE
        ),
        train=Train(precision=Precision.FP16, gradient_accumulation_steps=2),
    )
    model = gpt(shape, micro_batch_size=4, precision=Precision.FP16)
    (program,) = make_schedule(model, strategy).programs
    streams = {buffer.home: None for buffer in program.buffers}
    number = {stream: str(place) for place, stream in enumerate(streams)}
    short: dict[str, str] = {}
    found: list[Request] = []
    for entry in memory_ledger(program, steps=2):
        name = short.setdefault(entry.buffer, f"b{len(short)}")
        if entry.change_bytes > 0:
            home = program.by_name[entry.buffer].home
            found.append(Take(name, entry.change_bytes, number[home]))
        elif entry.change_bytes < 0:
            found.append(Give(name))
    return found


def served(record: Record, command: list[str], environment: dict[str, str]) -> Record:
    """The record with what a program prints that serves its requests."""
    found = subprocess.run(
        command,
        input="".join(f"{line}\n" for line in record.requests),
        env=os.environ | {"PYTORCH_ALLOC_CONF": record.settings} | environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    lines = (line.split() for line in found.splitlines())
    return replace(record, figures={name: int(value) for name, value in lines})


def by_stand_in(record: Record, program: str) -> Record:
    """Served without a device. Every other list has segments one below the other."""
    environment: dict[str, str] = {}
    if int(record.of.split()[1]) % 2:
        environment["STAND_IN_DOWNWARDS"] = "1"
    if SETTINGS[record.settings].garbage_collection_threshold:
        # PyTorch collects only under a limit; half of twice the memory is all of it.
        command = [program, "0.5"]
        environment["STAND_IN_BYTES"] = str(2 * record.capacity_bytes)
    else:
        command = [program]
        environment["STAND_IN_BYTES"] = str(record.capacity_bytes)
    return served(record, command, environment)


def can_be_served_on_a_device(record: Record) -> bool:
    """Memory of a device is limited by a fraction, which is not to the page for expandable ones."""
    return record.capacity_bytes == LARGE or not SETTINGS[record.settings].expandable_segments


def by_device(record: Record) -> Record:
    """Served by torch.cuda, in a process of its own."""
    script = str(Path(__file__).parent / "allocator_on_device.py")
    return served(record, [sys.executable, script, str(record.capacity_bytes)], {})


def main(program: str | None) -> None:
    """Serve all lists and write down what came of it."""
    if program is None:
        import torch  # noqa: PLC0415  (a stand-in needs none)

        by = f"PyTorch {torch.__version__} on {torch.cuda.get_device_name()}"
        records = [by_device(record) for record in lists() if can_be_served_on_a_device(record)]
    else:
        by = "libc10_cuda.so of PyTorch 2.13.0 for CUDA 13.0, on the runtime in stand_in_cuda"
        records = [by_stand_in(record, program) for record in lists()]
    each = [
        json.dumps(asdict(record) | {"requests": ", ".join(record.requests)}) for record in records
    ]
    text = f'{{"by": {json.dumps(by)}, "lists": [\n' + ",\n".join(each) + "\n]}\n"
    RECORDED.parent.mkdir(exist_ok=True)
    RECORDED.write_text(text, "utf-8")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
