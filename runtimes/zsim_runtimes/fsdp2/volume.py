"""Data volumes of PyTorch's FSDP2, with the first dimension of each parameter padded.

There is a group for each block and one for all other parameters. With W ranks, a parameter of d
rows has ceil(d / W) W rows on the wire. Blocks are gathered for forward and, if they were freed,
again for backward; the root once, unless it is freed as well. Frozen parameters are gathered but
not reduced. A block before the first gradient has no backward; the last of these is nevertheless
gathered for it.

In a pipeline, every group is gathered once and reduced once. If blocks are freed after forward, a
stage gathers them in the m - w + 1 backwards that follow a forward and, because it keeps them after
backward, in w forwards: m + 1 times for m micro-batches, w of which are ahead. With more than three
chunks, a chunk is gathered again after three others have run.

With expert ranks, the experts of a block are a separate group over the ranks that hold the same
ones.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from zsim.closed_form.by_model import kept_by_model
from zsim.closed_form.checkpoint import goes_back
from zsim.closed_form.data_volume import (
    CopiedBytes,
    DataVolume,
    all_reduces,
    over_tokens,
    wrapped,
)
from zsim.dtype import DType
from zsim.model.model import Model, Parameter
from zsim.model.pipeline_stages import Stage
from zsim.schedule.schedule import HostBytes, WireBytes
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Strategy
from zsim.zero.bucket import ShardAxis
from zsim.zero.names import DATA, EXPERT_DATA
from zsim_runtimes.fsdp2.options import FSDP2, Sync
from zsim_runtimes.fsdp2.placement import ShardPlacement, padded_elements


@dataclass(slots=True)
class GroupShare:
    """Elements of a rank's shard of a group, and of its trained parameters.

    It is sharded over the `ranks` of `axis`. `narrow` are the elements gathered in float8. For a
    block, `back` is True if backward reaches it, and `again` if backward gathers it.
    """

    elements: int
    trained: int
    narrow: int = 0
    back: bool = True
    again: bool = True
    axis: str = DATA
    ranks: int = 1

    def gathered_bytes(self, size: int) -> int:
        """Return the bytes of the shard on the wire; elements not in float8 have `size` bytes."""
        return (self.elements - self.narrow) * size + self.narrow * DType.FP8.size_bytes


def share(
    parameters: Sequence[Parameter], over: ShardAxis, placement: ShardPlacement
) -> GroupShare:
    """Return a rank's share of a group: the same part of each parameter."""
    axis, ranks = over
    sizes = {each: padded_elements(each, ranks, placement) // ranks for each in parameters}
    trained = sum(size for each, size in sizes.items() if not each.frozen)
    narrow = sum(size for each, size in sizes.items() if each.float8)
    elements = sum(sizes.values())
    return GroupShare(elements=elements, trained=trained, narrow=narrow, axis=axis, ranks=ranks)


def groups(model: Model, strategy: Strategy) -> tuple[list[GroupShare], GroupShare]:
    """Return the groups of each block that has parameters, and the root."""
    dense, experts = ShardAxis(DATA, strategy.parallel.data), None
    if strategy.has_expert_order:
        experts = ShardAxis(EXPERT_DATA, strategy.expert_data)
    placement = strategy.options(FSDP2).shard_placement_fn
    key = "FSDP2 groups", dense, experts, placement
    return kept_by_model(model, key, lambda: _groups(model, dense, experts, placement))


def _groups(
    model: Model, dense: ShardAxis, experts: ShardAxis | None, placement: ShardPlacement
) -> tuple[list[GroupShare], GroupShare]:
    inside, outside = wrapped(model)
    blocks: list[list[GroupShare]] = []
    for unit, own in inside:
        block = [share(part, over, placement) for part, over in _apart(own, dense, experts)]
        for group in block:
            group.back = goes_back(model, unit)
        blocks.append(block)
    behind = bool(outside)  # the root gathers the last block before its backward
    for block in reversed(blocks):
        for group in block:
            group.again = group.back or behind
        behind = block[0].back
    return [group for block in blocks for group in block], share(outside, dense, placement)


def _apart(
    own: Sequence[Parameter], dense: ShardAxis, experts: ShardAxis | None
) -> Iterator[tuple[list[Parameter], ShardAxis]]:
    """Yield the groups of a block's parameters; `experts` may have other ranks."""
    if experts is None:
        yield [*own], dense
        return
    for expert, over in ((False, dense), (True, experts)):
        if part := [each for each in own if each.expert is expert]:
            yield part, over


@dataclass(frozen=True, slots=True)
class Gathers:
    """Number of gathers of a group in a step, over the data axis and over its inner ranks."""

    group: GroupShare
    whole: int
    inner: int = 0


def gathers(model: Model, strategy: Strategy, *, times: int = 1) -> list[Gathers]:
    """Return the gathers of the root and of each block; a chunk is gathered `times` times."""
    options = strategy.options(FSDP2)
    blocks, root = groups(model, strategy)
    micro_batches = strategy.train.gradient_accumulation_steps
    if strategy.parallel.pipeline > 1:
        again = micro_batches + 1 if options.reshard_after_forward else times
        return [Gathers(root, times), *(Gathers(block, again) for block in blocks)]
    kept = not options.reshard_after_backward
    again = micro_batches if options.reshard_root_after_forward else 0
    found = [Gathers(root, (1 if kept else micro_batches) + again)]
    for block in blocks:
        stays = options.reshard_after_forward is False
        again = 0 if stays or not block.again else micro_batches
        whole = 1 if kept and (block.back or stays) else micro_batches
        if strategy.inner is None:
            found.append(Gathers(block, whole + again))
            continue
        if kept and not block.back:  # still sharded over the inner ranks
            again, whole = again + micro_batches - 1, 1
        found.append(Gathers(block, whole, again))
    return found


def data(model: Model, strategy: Strategy) -> list[WireBytes]:
    """Return the volume over the data axis, its inner part, and the replicas."""
    return _moved(model, strategy, gathers(model, strategy))


def of_stage(stage: Stage, strategy: Strategy) -> list[WireBytes]:
    """Return the same volume for a pipeline stage, whose chunks are wrapped separately."""
    times = gathers_per_chunk(stage.index, strategy)
    found: list[WireBytes] = []
    for chunk, many in zip(stage.chunks, times, strict=True):
        found += _moved(chunk.model, strategy, gathers(chunk.model, strategy, times=many))
    return found


def messages(stage: Stage, strategy: Strategy) -> list[WireBytes]:
    """Return the bytes a stage sends, on communicators with each neighbor or with all stages.

    The communicator of all stages has the messages that a stage of one chunk sends while it
    receives: of m micro-batches, w of which are ahead, m - w + 1 activations and m - w gradients.
    """
    count, index = strategy.parallel.pipeline, stage.index
    total = strategy.train.gradient_accumulation_steps
    ahead = min(total, count - index)
    exchanged = (0, 0)
    if not strategy.options(FSDP2).is_interleaved:
        exchanged = (total - ahead + 1, total - ahead)
    if strategy.options(FSDP2).stages_in_v:
        return _messages_in_v(stage, count, total)
    forward = sum(each.sent.size_bytes for each in stage.chunks if each.sent is not None)
    backward = sum(each.given.size_bytes for each in stage.chunks if each.given is not None)
    found: list[WireBytes] = []
    for size, other, many in (
        (forward, (index + 1) % count, exchanged[0]),
        (backward, (index - 1) % count, exchanged[1]),
    ):
        pair = f"pipeline{min(index, other)}_{max(index, other)}"
        for group, times in (("pipeline", many), (pair, total - many)):
            found.append(WireBytes(group=group, collective="send", bytes=times * size))
    return found


def _messages_in_v(stage: Stage, count: int, total: int) -> list[WireBytes]:
    """Return the bytes sent with chunks in a V; the last stage sends itself nothing."""
    index, (there, back) = stage.index, stage.chunks
    found: list[WireBytes] = []
    for value, other in (
        (there.sent, index + 1),
        (there.given, index - 1),
        (back.sent, index - 1),
        (back.given, index + 1),
    ):
        if value is not None and 0 <= other < count:
            pair = f"pipeline{min(index, other)}_{max(index, other)}"
            size = total * value.size_bytes
            found.append(WireBytes(group=pair, collective="send", bytes=size))
    return found


def gathers_per_chunk(index: int, strategy: Strategy) -> list[int]:
    """Return the number of times a stage gathers each of its chunks.

    A chunk stays whole until three others have run before its next turn. With a backward in two
    parts, half as many forwards are ahead, and on stage s the second part runs s backwards later.
    """
    stages, chunks = strategy.parallel.pipeline, strategy.options(FSDP2).chunks_of_stage
    splits = strategy.options(FSDP2).splits_backward
    micro_batches = strategy.train.gradient_accumulation_steps
    if chunks <= 3:
        return [1] * chunks
    turn = micro_batches // max(1, micro_batches // stages)
    forward = [number // turn % chunks for number in range(chunks * micro_batches)]
    ahead = min((chunks - 1) * turn + (2 - splits) * (stages - 1 - index), len(forward))
    visited, backward = forward[:ahead], [chunks - 1 - chunk for chunk in forward]
    for number, chunk in enumerate(backward):
        visited += [*forward[ahead + number : ahead + number + 1], chunk]
        if splits and number >= index:
            visited.append(backward[number - index])
    visited += backward[max(0, len(backward) - index) :] if splits else []
    found = [0] * chunks
    last: dict[int, int] = {}
    for place, chunk in enumerate(visited):
        between = set(visited[last[chunk] + 1 : place]) if chunk in last else set(range(chunks))
        found[chunk] += len(between) >= 3
        last[chunk] = place
    return found


def _moved(model: Model, strategy: Strategy, found: list[Gathers]) -> list[WireBytes]:
    options = strategy.options(FSDP2)
    ranks = strategy.parallel.data
    size = strategy.train.precision.compute.size_bytes
    wire = (options.reduce_dtype or strategy.train.precision.compute).size_bytes
    axes = dict.fromkeys((DATA, *(each.group.axis for each in found)))
    # A rank has 1 of `inner` parts of the padded whole; others come from its neighbors.
    inner = strategy.inner or 1
    inside = sum(
        (inner - 1) * (each.inner * each.group.elements * ranks // inner) for each in found
    )
    trained = [each.group.trained for each in found]
    each_over = [(axis, [each for each in found if each.group.axis == axis]) for axis in axes]
    syncs, sums = reductions(strategy)
    collects = _collects(strategy)
    return [
        *over_tokens(
            model,
            times=syncs,
            ranks=strategy.parallel.tensor,
            size_bytes=wire if collects else size,
            by_use=not collects,
        ),
        *(line for axis, own in each_over for line in _over(axis, own, size, syncs * wire)),
        WireBytes(group="inner", collective="all_gather", bytes=inside * size),
        *all_reduces(
            "replicate", trained * sums, ranks=strategy.parallel.replicate, size_bytes=wire
        ),
        *_scales(model, strategy),
    ]


def _over(axis: str, found: Sequence[Gathers], size: int, reduced: int) -> Iterator[WireBytes]:
    """Yield the gathers and reductions over an axis, of `size` and `reduced` bytes an element."""
    gathered = trained = 0
    for each in found:
        others = each.group.ranks - 1
        gathered += others * each.whole * each.group.gathered_bytes(size)
        trained += others * each.group.trained
    yield WireBytes(group=axis, collective="all_gather", bytes=gathered)
    yield WireBytes(group=axis, collective="reduce_scatter", bytes=trained * reduced)


def _scales(model: Model, strategy: Strategy) -> list[WireBytes]:
    """Return the volume of the scales of weights that are gathered in float8, once a step."""
    weights = sum(each.float8 for each in model.parameters)
    parallel, size = strategy.parallel, strategy.train.precision.optimizer.size_bytes
    return [
        line
        for axis, ranks in (("data", parallel.data), ("tensor", parallel.tensor))
        for line in all_reduces(axis, [weights][:weights], ranks=ranks, size_bytes=size)
    ]


def reductions(strategy: Strategy) -> tuple[int, int]:
    """Return the number of reductions of a step, over the data axis and over the replicas."""
    options, micro_batches = strategy.options(FSDP2), strategy.train.gradient_accumulation_steps
    if strategy.parallel.pipeline > 1:
        return 1, 1
    syncs = 1 if options.gradient_sync is Sync.LAST else micro_batches
    sums = 1 if Sync.LAST in (options.gradient_sync, options.all_reduce) else micro_batches
    return syncs, sums


def _collects(strategy: Strategy) -> bool:
    """Return True if whole gradients of several backwards are added up before they are reduced."""
    if strategy.parallel.pipeline > 1:
        return True
    several = strategy.train.gradient_accumulation_steps > 1
    return several and strategy.options(FSDP2).gradient_sync is Sync.LAST


def host(model: Model, strategy: Strategy) -> HostBytes:
    """Return the bytes that a rank copies: shards for each gather, gradients of each reduction.

    Both are in the storage dtype; a gradient is cast before the copy, a shard after it. A single
    rank copies only the shards that a backward needs.
    """
    precision = strategy.train.precision
    if not strategy.options(FSDP2).on_host:
        return HostBytes(to_host=0, from_host=0)
    back = out = 0
    for each in gathers(model, strategy):
        group, times = each.group, each.whole
        if group.ranks == 1 and not group.back and group.again:
            times -= strategy.train.gradient_accumulation_steps
        stored = group.trained * precision.optimizer.size_bytes
        stored += (group.elements - group.trained) * precision.compute.size_bytes
        back += times * stored
        out += group.trained * precision.optimizer.size_bytes
    syncs, sums = reductions(strategy)
    number = precision.optimizer.size_bytes  # reduced over ranks through the device
    clips = strategy.train.clip_norm is not None
    return HostBytes(
        to_host=out * (sums if strategy.parallel.replicate > 1 else syncs) + clips * number,
        from_host=back + (clips + (precision is Precision.FP16)) * number,
    )


def copied(model: Model, strategy: Strategy) -> CopiedBytes:
    """Return the bytes of copies of gathered parameters, and of gradients for their reduction.

    Before, whole gradients of several micro-batches are added up in the dtype of the reduction.
    """
    options, size = strategy.options(FSDP2), strategy.train.precision.compute.size_bytes
    wire = (options.reduce_dtype or strategy.train.precision.compute).size_bytes
    if strategy.parallel.data == 1:
        return CopiedBytes()
    apart = strategy.has_expert_order
    key = "FSDP2 copies", size, apart
    copied = kept_by_model(model, key, lambda: _whole_bytes(model, size, apart=apart))
    times = [each.whole + each.inner for each in gathers(model, strategy)]
    found = sum(each * many for each, many in zip(copied, times, strict=True)) * 2
    trained = sum(each.elements for each in model.parameters if not each.frozen)
    micro_batches = strategy.train.gradient_accumulation_steps
    if _collects(strategy):
        more = size + 2 * wire
        if options.splits_backward:  # gradients of parameters also accumulate in their own dtype
            more = min(more, 3 * size)
        added = (size + wire) + (micro_batches - 1) * more
        return CopiedBytes(compute=found + trained * (added + 2 * wire))
    return CopiedBytes(compute=found + micro_batches * trained * (size + wire))


def _whole_bytes(model: Model, size: int, *, apart: bool) -> list[int]:
    """Return the gathered bytes of the root and of each group of each block."""
    inside, outside = wrapped(model)
    over = ShardAxis(DATA, 1)
    groups = (part for _, own in inside for part, _ in _apart(own, over, over if apart else None))
    return [
        sum(each.elements * (DType.FP8.size_bytes if each.float8 else size) for each in own)
        for own in (outside, *groups)
    ]


VOLUME = DataVolume(data=data, of_stage=of_stage, messages=messages, host=host, copied=copied)
