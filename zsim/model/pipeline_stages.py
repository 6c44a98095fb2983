"""Units of a model split over the stages of a pipeline, as in nanotron, Megatron-LM, torchtitan.

`build_model` of nanotron (2025-02) assigns the model's blocks in order. A block goes to the current
stage. The next stage starts once the cost so far exceeds the share of the stages up to here. Costs
are matrix elements: a layer costs the elements of its matrices, the head the vocabulary times the
hidden size, embedding and norms nothing (`get_block_compute_costs`; it assumes as many heads for
keys and values as for queries). Norm, logits, their cast and the loss are separate blocks, so that
a stage can hold only the loss, and receive logits. With `head_is_on_one_stage` of its options they
stay
together: if they would be split, the last stage has all of them and the others the layers; and a
stage with exactly its share is full.

Megatron-LM and torchtitan assign layers by number (`layers_of_stages` of their options); the first
stage also has the embedding, the last one the head. A stage can have several chunks of layers,
which alternate with those of other stages: the layers of chunk c of stage s come after those of
chunk c of the stages before it (virtual stages, Narayanan et al. 2021, section 2.2.2).
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from zsim.model.model import BATCH, Model, ModelError, Segment, Unit, Value
from zsim.strategy.runtime_options import RuntimeOptions
from zsim.strategy.strategy import Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Consecutive units of a stage; it receives `given` and sends `sent`.

    Attributes:
        first: number of its first unit among those of the stage.
        model: only its units.
        given: value that its first unit reads from another stage; None at the start of the model.
        sent: value that its last unit computes for another stage; None at the end of the model.
    """

    first: int
    model: Model
    given: Value | None
    sent: Value | None

    @property
    def units(self) -> range:
        """Numbers of its units among those of the stage."""
        return range(self.first, self.first + len(self.model.units))

    @property
    def reads_batch(self) -> bool:
        """Return True if it needs the micro-batch: it embeds tokens or computes the loss."""
        return any(
            BATCH in segment.inputs for unit in self.model.units for segment in unit.segments
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Units that one stage runs, as a model, in one or more chunks.

    `tied` are parameters that both the first and the last stage hold: tied embeddings.
    """

    index: int
    model: Model
    chunks: tuple[Chunk, ...]
    tied: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        """The role of its ranks."""
        return f"stage{self.index}"

    @property
    def handed_on(self) -> Iterator[Value]:
        """Yield the values that it exchanges per micro-batch: inputs and outputs of its chunks."""
        for chunk in self.chunks:
            yield from (each for each in (chunk.given, chunk.sent) if each is not None)


def in_blocks(model: Model) -> Model:
    """Return `model` with its last unit split into one unit per block.

    A block ends with each segment up to the first that reads the batch; from there on it is the
    loss.
    """
    last = model.units[-1]
    loss = next(
        (place for place, each in enumerate(last.segments) if BATCH in each.inputs),
        len(last.segments) - 1,
    )
    if not loss:
        return model
    parts = [(segment,) for segment in last.segments[:loss]] + [last.segments[loss:]]
    cut = tuple(_block(last, f"{last.name}{place}", part) for place, part in enumerate(parts))
    return replace(model, units=(*model.units[:-1], *cut))


def _block(unit: Unit, name: str, segments: tuple[Segment, ...]) -> Unit:
    used = {parameter for segment in segments for parameter in segment.parameters}
    own = tuple(parameter for parameter in unit.parameters if parameter.name in used)
    return replace(unit, name=name, parameters=own, segments=segments)


def cost(model: Model, index: int) -> int:
    """Return the cost of unit `index`: elements of its matrices, over the tensor axis.

    The first unit of a transformer is its embedding, which costs nothing.
    """
    if index == 0 and model.architecture is not None:
        return 0
    return model.count_of(each for each in model.units[index].parameters if len(each.shape) > 1)


def places(model: Model, count: int, *, head_is_on_one_stage: bool = False) -> list[int]:
    """Return the stage of each unit in nanotron."""
    costs = [cost(model, index) for index in range(len(model.units))]
    return _places(costs, count, head_is_on_one_stage=head_is_on_one_stage)


def _places(costs: Sequence[int], count: int, *, head_is_on_one_stage: bool) -> list[int]:
    """Return the stage of each unit by its cost; the head is the last unit with a cost."""
    found = _dealt(costs, count, full_at_share=head_is_on_one_stage)
    head = max((place for place, each in enumerate(costs) if each), default=0)
    if not head_is_on_one_stage or found[head] == found[-1] or found[-1] != count - 1:
        return found
    layers = head
    while layers and not costs[layers - 1]:  # the norm before it
        layers -= 1
    dealt = _dealt(costs[:layers], count - 1, full_at_share=True)
    return dealt + [count - 1] * (len(costs) - layers)


def layer_counts(model: Model, layers: int, strategy: Strategy, *, most: int) -> range:
    """Return the numbers of layers, at most `most`, with which every stage has a unit.

    Each layer costs the same as one of the `layers` of `model`. The range starts at the fewest
    layers; its step is the distance to the next number that fills the stages.
    """
    count, runtime = strategy.parallel.pipeline, strategy.zero.emulate
    costs = [cost(model, index) for index in range(len(model.units))]

    def fills(many: int) -> bool:
        try:
            if _layers_of_stages(runtime, many, count) is not None:
                return True
        except ValueError:
            return False
        own = costs[1:2] * many
        found = _places(
            [costs[0], *own, *costs[1 + layers :]],
            count,
            head_is_on_one_stage=_head_is_on_one_stage(runtime),
        )
        return set(found) == set(range(count))

    filling = (many for many in range(1, most + 1) if fills(many))
    fewest = next(filling, layers)
    return range(fewest, most + 1, next(filling, most + 1) - fewest)


def _dealt(costs: Sequence[int], count: int, *, full_at_share: bool) -> list[int]:
    """Return the stage of each unit; the share of a stage is an equal part of the whole cost."""
    total, so_far, stage = sum(costs), 0, 0
    found: list[int] = []
    for each in costs:
        found.append(stage)
        so_far += each
        share = total * (stage + 1)
        is_full = full_at_share and so_far * count == share and stage < count - 1
        if so_far * count > share or is_full:
            stage += 1
    return found


def placed(model: Model, sizes: Sequence[int]) -> list[int]:
    """Return the virtual stage of each unit, where stage i has `sizes[i]` layers.

    Layers are the blocks that can be checkpointed. Units before all of them are on the first stage,
    units after them on the last.
    """
    ends = list(accumulate(sizes))
    found: list[int] = []
    begun = 0
    for block in model.checkpointed_together:
        if block[0].checkpoint:
            begun += 1
            place = bisect_left(ends, begun)
        elif not begun:
            place = 0
        else:
            place = len(ends) - 1 if begun == ends[-1] else found[-1]
        found += [place] * len(block)
    return found


def _layers_of_stages(
    runtime: RuntimeOptions | None, layers: int, stages: int
) -> tuple[int, ...] | None:
    """Return the layers of each virtual stage; None if blocks are assigned by cost.

    Raises:
        ValueError: the layers cannot be split in the configured manner.
    """
    return None if runtime is None else runtime.layers_of_stages(layers=layers, stages=stages)


def _head_is_on_one_stage(runtime: RuntimeOptions | None) -> bool:
    return runtime is not None and runtime.head_is_on_one_stage


def virtual_stages(model: Model, strategy: Strategy) -> list[int]:
    """Return the virtual stage of each unit of a model under a strategy.

    Raises:
        ModelError: layers cannot be split in this manner, or a stage would have no unit.
    """
    count, runtime = strategy.parallel.pipeline, strategy.zero.emulate
    layers = sum(block[0].checkpoint for block in model.checkpointed_together)
    try:
        sizes = _layers_of_stages(runtime, layers, count)
    except ValueError as error:
        raise ModelError(str(error)) from None
    if sizes is None:
        found = places(model, count, head_is_on_one_stage=_head_is_on_one_stage(runtime))
        if len(filled := set(found)) != count:
            raise ModelError(
                f"parallel.pipeline: {count} stages are more than the {len(filled)} that the "
                f"{len(model.units)} blocks of the model fill"
            )
        return found
    found = placed(model, sizes)
    if empty := sorted({*range(len(sizes))}.difference(found)):
        raise ModelError(
            f"parallel.pipeline: stage {empty[0]} of {len(sizes)} would have no unit of the model"
        )
    return found


def stages(model: Model, strategy: Strategy) -> tuple[Stage, ...]:
    """Return `model` split over the stages of a strategy.

    Raises:
        ModelError: a stage would have no unit, layers cannot be split, or a stage would have to
            send more than one value.
    """
    count, runtime = strategy.parallel.pipeline, strategy.zero.emulate
    found = virtual_stages(model, strategy)
    in_v = runtime is not None and runtime.stages_in_v
    ranks = [_rank_of(place, count, in_v=in_v) for place in found]
    tied = _tied(model, ranks, ends=runtime is not None and runtime.ties_ends)
    made: list[list[Chunk]] = [[] for _ in range(count)]
    given: Value | None = None
    for place in range(found[-1] + 1):
        own = made[_rank_of(place, count, in_v=in_v)]
        first, end = bisect_left(found, place), bisect_right(found, place)  # in ascending order
        part = _chunk_model(model, model.units[first:end], given)
        sent = part.loss if place < found[-1] else None
        before = sum(len(each.model.units) for each in own)
        own.append(Chunk(first=before, model=part, given=given, sent=sent))
        given = sent
    return tuple(
        Stage(
            index=index,
            model=_joined(model, chunks),
            chunks=tuple(chunks),
            tied=tied if index in {0, count - 1} else frozenset(),
        )
        for index, chunks in enumerate(made)
    )


def _rank_of(place: int, count: int, *, in_v: bool) -> int:
    """Return the stage of a virtual stage: in rotation, or in a V, forth and back."""
    turns, rank = divmod(place, count)
    return count - 1 - rank if in_v and turns % 2 else rank


def _joined(model: Model, chunks: Sequence[Chunk]) -> Model:
    """Return the units of all chunks of a stage as one model."""
    if len(chunks) == 1:
        return chunks[0].model
    own = {chunk.sent.name for chunk in chunks if chunk.sent is not None}
    given = [chunk.given for chunk in chunks if chunk.given is not None]
    return replace(
        model,
        units=tuple(unit for chunk in chunks for unit in chunk.model.units),
        given=tuple(value for value in given if value.name not in own),
    )


def _chunk_model(model: Model, units: tuple[Unit, ...], given: Value | None) -> Model:
    """Return the units of a chunk as a separate model.

    Raises:
        ModelError: they read a value that the previous stage does not send.
    """
    known = {model.batch.name} | ({given.name} if given else set())
    for unit in units:
        for segment in unit.segments:
            for name in segment.inputs:
                if name not in known:
                    raise ModelError(
                        f"parallel.pipeline: {unit.name} reads {name}, which the stage before it "
                        "does not hand on"
                    )
            known.update([value.name for value in segment.outputs])
    return replace(model, units=units, given=(given,) if given else ())


def _tied(model: Model, found: list[int], *, ends: bool) -> frozenset[str]:
    """Return parameters that the first and the last stage both hold, if the runtime ties `ends`.

    Raises:
        ModelError: other stages have a parameter in common.
    """
    owner: dict[str, int] = {}
    tied: set[str] = set()
    for unit, stage in zip(model.units, found, strict=True):
        for parameter in unit.parameters:
            other = owner.setdefault(parameter.name, stage)
            if other == stage:
                continue
            if unit.module:
                raise ModelError(
                    f"model.hidden_groups: {unit.module} would be on stages {other} and "
                    f"{stage} of the pipeline"
                )
            if not ends or (other, stage) != (0, max(found)):
                raise ModelError(
                    f"model.tied_embeddings: true puts {parameter.name} on stages {other} and "
                    f"{stage} of the pipeline, and the sum of its gradients over stages is not "
                    "modelled, allowed is false"
                )
            tied.add(parameter.name)
    return frozenset(tied)
