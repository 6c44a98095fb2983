"""Check that ranks start with equal parameters and buffers, by exchanging digests.

DDP broadcasts the values of rank 0. Here each rank uses its own, so with unequal values replicas
would diverge, and shards would come from different modules.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Final, NamedTuple, cast

import torch
from torch import distributed, nn

from zsim.backend.backend import RefusedError
from zsim.schedule.schedule import Program, Schedule
from zsim.zero.names import CONTEXT, PIPELINE, TENSOR
from zsim_torch.execute.shard_compute import Initial
from zsim_torch.module.tensor_values import has_values
from zsim_torch.observe.watchers import unwatched

CHUNK: Final = 2**16
"""Number of 8-byte words that are mixed at once."""

SAMPLE: Final = 4
"""Number of matrices that all ranks compare if a function or a folder provides the values."""

STAGE: Final = (TENSOR, CONTEXT, PIPELINE)
"""Axes along which ranks may have different buffers and different parts of parameters."""

_MIX: Final = 0x1E3779B97F4A7C15
_WORD: Final = 2**64


class Digest(NamedTuple):
    """The shape and data type of a tensor, and a digest of its values."""

    extent: str
    values: int


def digest_of(tensor: torch.Tensor) -> Digest:
    """Return the digest of a tensor, computed on its device, one chunk at a time.

    For a tensor without values, the digest covers only shape and data type.
    """
    shape = " x ".join(map(str, tensor.shape)) or "one"
    extent = f"{shape} {str(tensor.dtype).removeprefix('torch.')}"
    if not has_values(tensor):
        return Digest(extent, 0)
    with torch.no_grad(), unwatched():
        flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
        total = 0
        for number, words in enumerate(_chunks(flat.view(torch.uint8))):
            weights = (
                torch.arange(1, 2 * words.numel(), 2, device=words.device) + number * 2 * CHUNK
            )
            mixed = words * _MIX
            mixed ^= mixed >> 29
            total += int((mixed * _MIX ^ mixed >> 32).mul_(weights).sum())
    return Digest(extent, total % _WORD)


def _chunks(octets: torch.Tensor) -> Iterator[torch.Tensor]:
    for start in range(0, octets.numel(), 8 * CHUNK):
        part = octets[start : start + 8 * CHUNK]
        if part.numel() % 8 or part.storage_offset() % 8:
            padded = part.new_zeros(-(-part.numel() // 8) * 8)
            padded[: part.numel()] = part
            part = padded
        yield part.view(torch.int64)


@dataclass(slots=True)
class NotedValues:
    """Initial values by name; computes the digest of each value that is read."""

    initial: Initial
    digests: dict[str, Digest] = field(default_factory=dict[str, Digest])

    def __call__(self, name: str) -> torch.Tensor:
        """Return the value of a parameter."""
        found = self.initial(name)
        if name not in self.digests and _has_others():
            self.digests[name] = digest_of(found)
        return found


@dataclass(frozen=True, slots=True)
class _Start:
    """Digests of the initial parameters and buffers of a rank."""

    parameters: Mapping[str, Digest]
    buffers: Mapping[str, Digest]
    names: tuple[str, ...]
    """Names of parameters, frozen ones marked, and of buffers, in the order of the module."""


def need_equal_start(
    schedule: Schedule,
    program: Program,
    module: nn.Module,
    values: NotedValues,
    *,
    is_modules: bool,
) -> None:
    """Raise RefusedError on every rank unless all start with equal parameters and buffers.

    Every rank calls it after setup. With `is_modules`, the values are the module's own, and all
    parameters of the program are compared; otherwise those that ranks have read, and a few
    matrices.
    """
    if not _has_others():
        return
    named = {
        piece.parameter
        for buffer in program.buffers
        if buffer.layout is not None
        for piece in schedule.layout_by_name[buffer.layout].pieces
    }
    own = {name: each for name, each in module.named_parameters() if name in named}
    matrices = sorted(
        (name for name, each in own.items() if each.dim() > 1), key=lambda name: own[name].numel()
    )
    for name in own if is_modules else matrices[:SAMPLE]:
        if name not in values.digests:
            values(name)
    buffers = {name: digest_of(each) for name, each in module.named_buffers()}
    found: list[_Start | None] = [None] * distributed.get_world_size()
    distributed.all_gather_object(found, _Start(values.digests, buffers, _names_of(module)))
    starts = cast("list[_Start]", found)
    _need_equal_names(schedule, starts)
    _need_equal(schedule, starts)


def _names_of(module: nn.Module) -> tuple[str, ...]:
    parameters = (
        f"parameter {name}{'' if each.requires_grad else ' (frozen)'}"
        for name, each in module.named_parameters()
    )
    return (*parameters, *(f"buffer {name}" for name, _ in module.named_buffers()))


def _need_equal_names(schedule: Schedule, starts: Sequence[_Start]) -> None:
    """Raise RefusedError unless ranks of one pipeline stage have the same names in the same order.

    Ranks build their schedules independently: with different orders they would add up gradients of
    different parameters.
    """
    known: dict[tuple[int, ...], int] = {}
    for rank, start in enumerate(starts):
        place = schedule.mesh.coordinates(rank)
        first = known.setdefault(tuple(place.get(each, 0) for each in STAGE), rank)
        both = zip_longest(starts[first].names, start.names, fillvalue="nothing")
        for one, other in both:
            if one != other:
                raise RefusedError(
                    f"module: rank {rank} has {other} where rank {first} has {one}; make the same "
                    "module on all ranks, with its parts in the same order"
                )


def need_equal_seed(seed: int) -> None:
    """Raise RefusedError on every rank unless all use the same seed."""
    if not _has_others():
        return
    found: list[int | None] = [None] * distributed.get_world_size()
    distributed.all_gather_object(found, seed)
    for rank, other in enumerate(found):
        if other != found[0]:
            raise RefusedError(
                f"seed: {other} on rank {rank}, and {found[0]} on rank 0; give all ranks one seed"
            )


def _has_others() -> bool:
    return distributed.is_initialized() and distributed.get_world_size() > 1


def _need_equal(schedule: Schedule, starts: list[_Start]) -> None:
    """Raise RefusedError unless ranks that hold copies of a parameter have equal values.

    Buffers must be equal on ranks of one stage.
    """
    experts = {each.name for each in schedule.contract.parameters if each.expert}
    of_experts = schedule.contract.expert_axes
    places = [schedule.mesh.coordinates(rank) for rank in range(len(starts))]
    for kind, axes in (("parameter", (TENSOR,)), ("buffer", STAGE)):
        known: dict[tuple[object, ...], tuple[int, Digest]] = {}
        for rank, (place, start) in enumerate(zip(places, starts, strict=True)):
            digests = start.parameters if kind == "parameter" else start.buffers
            for name, digest in digests.items():
                differs = of_experts if name in experts else axes
                key = (name, *(place.get(axis, 0) for axis in differs))
                first, expected = known.setdefault(key, (rank, digest))
                if digest != expected:
                    raise RefusedError(_line(f"{kind} {name}", (first, rank), (expected, digest)))


def _line(what: str, ranks: tuple[int, int], digests: tuple[Digest, Digest]) -> str:
    one, other = (each.extent for each in digests)
    if one != other:
        return (
            f"{what}: it is {other} on rank {ranks[1]}, and {one} on rank {ranks[0]}; make the "
            "same module on all ranks"
        )
    return (
        f"{what}: rank {ranks[1]} begins with other values than rank {ranks[0]}; call "
        "torch.manual_seed with one seed before the module is made, or load the same file on all "
        "ranks"
    )
