"""Parameter shards in ZeRO-3: each parameter padded separately, many in one flat sub-group.

Functions named in comments are from `runtime/zero/stage3.py` in DeepSpeed 0.19.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from zsim.dtype import DType
from zsim.model.model import Model, Parameter
from zsim.schedule.layout import Layout, Piece
from zsim.schedule.operation import View
from zsim.schedule.replace import replace
from zsim.schedule.schedule import Kind
from zsim.schedule.schedule_writer import ScheduleWriter
from zsim.strategy.strategy import Strategy
from zsim.zero.bucket import Bucket, Buckets, Packed, Packing, numbered
from zsim.zero.parameter_groups import by_rule
from zsim_runtimes.deepspeed.options import DeepSpeed, OffloadDevice


@dataclass(frozen=True, slots=True, kw_only=True)
class Shards:
    """The parameters of a model, and the location of their shards.

    Attributes:
        parameters: one bucket for each parameter, in the order of the model.
        groups: sub-groups, updated one by one. Shards of frozen parameters, which are not updated,
            are in one separate sub-group (in DeepSpeed each alone).
        where: for each parameter, its sub-group and the offset of its shard in a rank's shard of
            the sub-group.
        persistent: numbers of the parameters that stay whole from one update to the next.
        filed: numbers of the parameters with shards in files.
    """

    parameters: Buckets
    groups: Buckets
    where: tuple[tuple[int, int], ...]
    persistent: tuple[int, ...]
    filed: frozenset[int] = frozenset()

    @property
    def filed_groups(self) -> frozenset[int]:
        """Sub-groups with a parameter in a file."""
        return frozenset(self.where[number][0] for number in self.filed)

    @property
    def outside_files(self) -> tuple[int, ...]:
        """Parameters of these sub-groups that are not in files themselves."""
        groups = self.filed_groups
        every = enumerate(self.where)
        return tuple(n for n, (group, _) in every if group in groups and n not in self.filed)

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """Layouts of sub-groups, of whole parameters, and of their gradients."""
        runs = [run.layout for runs in self.parameters.runs for run in runs if run.layout]
        return (
            *(bucket.layout for bucket in self.groups.all),
            *(bucket.plain for bucket in self.parameters.all),
            *(self.bucket(number).layout for number in self.outside_files),
            *runs,
        )

    def shard(self, number: int, buffer: str) -> View:
        """Return a parameter's part of `buffer`, which holds a rank's shard of its sub-group."""
        return View(buffer=buffer, start=self.where[number][1], size=self.bucket(number).shard)

    def bucket(self, number: int) -> Bucket:
        """Return the bucket of the parameter."""
        return self.parameters.all[number]

    def together(self, name: str, numbers: Sequence[int], axis: str) -> Layout:
        """Return the layout of parameters in one flat tensor: parts of all, rank by rank."""
        starts = (0, *accumulate(self.bucket(number).padded for number in numbers))
        pieces = [
            replace(piece, start=start)
            for number, start in zip(numbers, starts, strict=False)
            for piece in self.bucket(number).layout.pieces
        ]
        return Layout(
            name=name, pieces=tuple(pieces), elements=starts[-1], axis=axis, blocks=starts[:-1]
        )

    def one_after_the_other(self, name: str, numbers: Sequence[int]) -> Layout:
        """Return the layout of whole parameters without padding."""
        starts = (0, *accumulate(self.bucket(number).elements for number in numbers))
        pieces = [
            Piece(parameter=piece.parameter, start=start, size=piece.size)
            for number, start in zip(numbers, starts, strict=False)
            for piece in self.bucket(number).layout.pieces
        ]
        return Layout(name=name, pieces=tuple(pieces), elements=starts[-1])


def flat_buffers(
    writer: ScheduleWriter,
    layout: Layout,
    names: tuple[str, str],
    *,
    ranks: int,
    dtype: DType,
    home: str,
) -> None:
    """Declare buffers of a flat tensor and of a rank's part of it, with `layout`."""
    for name, size, axis in zip(names, (1, ranks), (None, layout.axis), strict=True):
        writer.buffer(
            name,
            layout.elements // size,
            dtype,
            Kind.COMMUNICATION,
            home=home,
            layout=layout.name,
            shard=axis,
        )


def shards(model: Model, strategy: Strategy) -> Shards:
    """Return the parameters of `model`, sharded over the data axis.

    Parameters with different update rules are in different sub-groups.
    """
    # _create_fp16_partitions_with_defragmentation: sub-groups of each group of parameters
    ranks, options = strategy.parallel.data, strategy.options(DeepSpeed)
    place = _padded_each(ranks)
    alone = [[parameter] for parameter in model.parameters]
    parameters = numbered(model, alone, place=place, ranks=ranks, name="parameter")
    frozen = [parameter for parameter in model.parameters if parameter.frozen]
    trained = [parameter for parameter in model.parameters if not parameter.frozen]
    own = [
        group
        for parameters in by_rule(trained, strategy)
        for group in sub_groups(parameters, ranks, options)
    ]
    together = own + ([frozen] if frozen else [])
    groups = numbered(model, together, place=place, ranks=ranks, name="sub_group")
    starts = {
        piece.parameter: (group.index, piece.start // ranks)
        for group in groups.all
        for piece in group.layout.pieces
    }
    # as in mark_persistent_parameters of parameter_offload.py
    limit = options.stage3_param_persistence_threshold
    found = Shards(
        parameters=parameters,
        groups=groups,
        where=tuple(starts[parameter.name] for parameter in model.parameters),
        persistent=tuple(bucket.index for bucket in parameters.all if bucket.elements <= limit),
    )
    sizes = [len(sub_groups(each, ranks, options)) for each in by_rule(trained, strategy)]
    return replace(found, filed=_filed(found, sizes, strategy))


def _filed(shards: Shards, sizes: Sequence[int], strategy: Strategy) -> frozenset[int]:
    """Return numbers of parameters in files; `sizes` has the number of sub-groups of each rule.

    Persistent parameters are not in files here; DeepSpeed moves them through a slot once a step.
    """
    # _create_param_groups_fp16_flat_cpu_memory, _create_fp16_partitions_with_defragmentation:
    # sub-groups that fit into max_in_cpu; AsyncPartitionedParameterSwapper.swappable_tensor
    options, dtype = strategy.options(DeepSpeed), strategy.train.precision.compute
    if options.offload_param.device is not OffloadDevice.NVME:
        return frozenset()
    on_cpu: set[int] = set()
    left, first = options.offload_param.max_in_cpu, 0
    for size in sizes:
        offset = 0
        for group in shards.groups.all[first : first + size]:
            offset += group.shard
            if offset <= left:
                on_cpu.add(group.index)
        left, first = max(0, left - offset), first + size
    return frozenset(
        number
        for number, (group, _) in enumerate(shards.where)
        if group not in on_cpu
        and number not in shards.persistent
        and shards.bucket(number).shard * dtype.size_bytes >= options.least_file_bytes
    )


def sub_groups(
    parameters: Sequence[Parameter], ranks: int, options: DeepSpeed
) -> list[list[Parameter]]:
    """Return parameters by sub-group, each full with `sub_group_size` elements of shards."""
    # _create_fp16_sub_groups
    sizes = [-(-parameter.elements // ranks) for parameter in parameters]
    if sum(sizes) <= options.sub_group_size:
        return [list(parameters)]
    found: list[list[Parameter]] = []
    filled = options.sub_group_size
    for parameter, size in zip(parameters, sizes, strict=True):
        if filled >= options.sub_group_size:
            found.append([])
            filled = 0
        found[-1].append(parameter)
        filled += size
    return found


def _padded_each(ranks: int) -> Packing:
    """Return a packing with every parameter padded to a multiple of `ranks`."""

    # _partition_param and _aligned_size in partition_parameters.py
    def place(parameters: Sequence[Parameter]) -> Packed:
        sizes = (-(-parameter.elements // ranks) * ranks for parameter in parameters)
        starts = (0, *accumulate(sizes))
        return Packed(starts=starts[:-1], elements=starts[-1], blocks=starts[:-1])

    return place
