"""Volume: a step sends the promised bytes.

Proved for every role: the ring-equivalent bytes of one step, summed over its operations by group
and collective with scalars separate, equal the promise as integers, and so do the bytes copied
from device to host and back. Counted rows have the numbers of a balance. A contract that names its
strategy must promise its loss divisor and, if the model is given, the volume and host traffic of
the closed forms. Without a promise nothing is checked. A branch counts with its list `otherwise`.

Cost: linear in the operations that communicate, and in the copies if there is host memory.
"""

from collections import Counter
from collections.abc import Iterator
from math import prod

from zsim.network.volume import communications, is_scalar, ring_equivalent_bytes
from zsim.proof.context import Context, NumberedProgram
from zsim.proof.finding import Finding
from zsim.runtimes.registry import file_bytes, host_bytes, wire_bytes
from zsim.schedule.communication import AllToAll, CollectiveOperation, Communication
from zsim.schedule.host_traffic import file_bytes as moved_by
from zsim.schedule.host_traffic import host_bytes as copied_by
from zsim.schedule.program_index import Numbered
from zsim.schedule.schedule import HostBytes, Schedule

INVARIANT = "volume"
Line = tuple[str, str, bool]
"""Group, collective, and whether it is a scalar."""


def examine(context: Context) -> list[Finding]:
    """Find every line of the promised volume that is not kept."""
    contract = context.schedule.contract
    found = list(_contract(context))
    for each in context.programs:
        if contract.wire_bytes is not None:
            promised: Counter[Line] = Counter()
            for line in contract.wire_bytes:
                if line.role in ("", each.program.role):
                    promised[line.group, line.collective, line.scalar] += line.bytes
            found += _wire(context, each, promised)
        for copied in contract.host_bytes or ():
            if copied.role in ("", each.program.role):
                found += _host(context, each, copied)
        if contract.file_bytes is not None:
            moved = moved_by(each.program)
            for verb, size, said in (
                ("reads", moved.read, contract.file_bytes.read),
                ("writes", moved.written, contract.file_bytes.written),
            ):
                if size != said:
                    why = f"a step {verb} {size} bytes of files, promised are {said}"
                    found.append(
                        Finding(
                            invariant=INVARIANT,
                            role=each.program.role,
                            operation=f"files/{verb}",
                            why=why,
                        )
                    )
    return found


def _contract(context: Context) -> Iterator[Finding]:
    """Find promises of the contract that differ from those of model and strategy."""
    contract, model = context.schedule.contract, context.model
    strategy = contract.strategy
    if strategy is None:
        return
    divisor = strategy.replicas * strategy.train.gradient_accumulation_steps
    lines: list[tuple[str, object, object]] = [("loss_divisor", contract.loss_divisor, divisor)]
    if contract.expert_axes or strategy.has_expert_order:
        mesh, asked = context.schedule.mesh, strategy.parallel.expert * strategy.expert_tensor
        parts = prod(mesh.axis_size(axis) for axis in contract.expert_axes)
        lines.append(("expert_axes", parts, asked if strategy.has_expert_order else 1))
    if model is not None and model.tensor == strategy.parallel.tensor:
        volumes = None if contract.wire_bytes is None else set(contract.wire_bytes)
        lines += [
            ("wire_bytes", volumes, set(wire_bytes(model, strategy))),
            ("host_bytes", contract.host_bytes, host_bytes(model, strategy)),
            ("file_bytes", contract.file_bytes, file_bytes(model, strategy)),
        ]
    for name, promised, said in lines:
        if promised is not None and promised != said:
            yield Finding(
                invariant=INVARIANT,
                role="",
                operation=f"contract/{name}",
                why=f"promises another {name} than model and strategy say",
                witness=(f"promised: {promised}", f"by closed form: {said}"),
            )


def _wire(context: Context, each: NumberedProgram, promised: Counter[Line]) -> Iterator[Finding]:
    schedule, step = context.schedule, each.step
    counts = {group.name: group.size(schedule.mesh) for group in schedule.groups}
    counted = _without_overflow(step, step.items) if step.sides else None
    sent: Counter[Line] = Counter()
    senders: dict[Line, list[tuple[str, int]]] = {}
    for number in step.communications:
        if counted is not None and number not in counted:
            continue
        for member in communications(step.operations[number]):
            size = _sent(schedule, each, member, counts[member.group])
            if size:
                line = (member.group, member.name, is_scalar(member))
                sent[line] += size
                senders.setdefault(line, []).append((member.id, size))
    for line in sorted(sent.keys() | promised.keys()):
        if sent[line] != promised[line]:
            group, collective, scalar = line
            what = f"{'scalar ' if scalar else ''}{collective}"
            lines = [f"{name}: {size} bytes" for name, size in senders.get(line, ())[:4]]
            yield Finding(
                invariant=INVARIANT,
                role=each.program.role,
                operation=f"{group}/{collective}",
                why=f"a step sends {sent[line]} bytes by {what}, promised are {promised[line]}",
                witness=(
                    *(lines or ["nothing sends"]),
                    f"{len(senders.get(line, ()))} operations in all",
                ),
            )


def _sent(schedule: Schedule, each: NumberedProgram, member: Communication, ranks: int) -> int:
    """Return the ring-equivalent bytes of a communication; counted rows have balanced numbers."""
    if schedule.counts and isinstance(member, CollectiveOperation):
        rows = each.program.by_name[member.source.buffer].rows
        if rows is not None:
            (count,) = (one for one in schedule.counts if one.name == rows.count)
            elements = count.sent * rows.width
            block = -(-elements // ranks) if isinstance(member, AllToAll) else elements
            return (ranks - 1) * block * member.wire.size_bytes
    return ring_equivalent_bytes(member, ranks)


def _host(context: Context, each: NumberedProgram, promised: HostBytes) -> Iterator[Finding]:
    copied = copied_by(context.schedule, each.program)
    for way, size, said in (
        ("to_host", copied.to_host, promised.to_host),
        ("from_host", copied.from_host, promised.from_host),
    ):
        if size != said:
            yield Finding(
                invariant=INVARIANT,
                role=each.program.role,
                operation=f"host/{way}",
                why=f"a step copies {size} bytes {way.replace('_', ' ')}, promised are {said}",
            )


def _without_overflow(step: Numbered, items: list[int]) -> set[int]:
    """Return numbers of the operations that run if every branch takes `otherwise`."""
    found = set(items)
    for number in items:
        if number in step.sides:
            found |= _without_overflow(step, step.sides[number][1])
    return found
