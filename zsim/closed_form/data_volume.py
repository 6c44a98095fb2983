"""Volume of parameters and gradients over the data axes; each runtime has its own formulas."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from zsim.model.model import Model, Parameter, Unit
from zsim.model.pipeline_stages import Stage
from zsim.schedule.schedule import FileBytes, HostBytes, WireBytes
from zsim.strategy.strategy import Strategy


def clipped_once(model: Model, strategy: Strategy) -> int:
    """Return 1 if gradients are clipped, the number of norms that are reduced; else 0."""
    del model
    return 0 if strategy.train.clip_norm is None else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CopiedBytes:
    """Lower bounds of device memory bytes that copies read and write in a step.

    Attributes:
        compute: of copies between the kernels of forward and backward, on their stream.
        beside: bytes copied on other streams.
    """

    compute: int = 0
    beside: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DataVolume:
    """A runtime's own formulas: volume of parameters and gradients, and number of norms.

    `of_stage` is the volume of a pipeline stage, if it differs from that of a model of its units.
    `messages` is the volume that a stage sends, if it uses several communicators. `copied` counts
    copies of parameters and gradients on the device, `host` copies between device and host,
    `files` reads and writes; None stands for those of `[offload]` in zsim's own stages.
    `checkpoints` counts the copies of checkpoints; None means that each is copied out and back
    once. `reduces_overflow` is False if ranks test only their own gradients for overflow.
    """

    data: Callable[[Model, Strategy], list[WireBytes]]
    of_stage: Callable[[Stage, Strategy], list[WireBytes]] | None = None
    messages: Callable[[Stage, Strategy], list[WireBytes]] | None = None
    norms: Callable[[Model, Strategy], int] = clipped_once
    copied: Callable[[Model, Strategy], CopiedBytes] | None = None
    host: Callable[[Model, Strategy], HostBytes] | None = None
    files: Callable[[Model, Strategy], FileBytes | None] | None = None
    checkpoints: Callable[[Model, Strategy], HostBytes] | None = None
    reduces_overflow: bool = True


def all_reduces(
    group: str, elements: Iterable[int], *, ranks: int, size_bytes: int
) -> list[WireBytes]:
    """Return the ring volume of all-reduces of `elements`; single elements are listed as scalar."""
    sent = {True: 0, False: 0}
    for count in elements:
        sent[count == 1] += 2 * (ranks - 1) * -(-count // ranks) * size_bytes
    return [
        WireBytes(group=group, collective="all_reduce", bytes=total, scalar=scalar)
        for scalar, total in sent.items()
    ]


def over_tokens(
    model: Model, *, times: int, ranks: int, size_bytes: int, by_use: bool = True
) -> list[WireBytes]:
    """Return the volume of sums of gradients over copies of parameters, one parameter at a time.

    They exist if values between units are split by tokens over `ranks` of the tensor axis, and for
    norms of each rank's own heads. A parameter that several units use is summed for each of them,
    or once if `by_use` is False.
    """
    summed = model.summed_copies
    used = [each for unit in model.units for each in unit.parameters]
    copies = [
        each.elements
        for each in (used if by_use else model.parameters)
        if each.name in summed and not each.frozen
    ]
    return all_reduces("tensor", copies * times, ranks=ranks, size_bytes=size_bytes)


def closed_before(sizes: Iterable[int], limit: int) -> Iterator[int]:
    """Yield the elements of buckets, each closed before the next size would exceed `limit`."""
    filled = 0
    for size in sizes:
        if filled and filled + size > limit:
            yield filled
            filled = 0
        filled += size
    yield filled


def use_counts(model: Model) -> Counter[str]:
    """Return the number of units that use each parameter."""
    return Counter(parameter.name for unit in model.units for parameter in unit.parameters)


def wrapped(model: Model) -> tuple[list[tuple[Unit, list[Parameter]]], list[Parameter]]:
    """Return blocks with parameters of their own, and the root's: FSDP gathers each as one."""
    uses = use_counts(model)
    blocks: list[tuple[Unit, list[Parameter]]] = []
    inside: set[str] = set()
    for unit in model.units:
        own = [each for each in unit.parameters if unit.checkpoint and uses[each.name] == 1]
        inside.update(each.name for each in own)
        if own:
            blocks.append((unit, own))
    return blocks, [each for each in model.parameters if each.name not in inside]
