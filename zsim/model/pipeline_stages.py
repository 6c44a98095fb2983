"""Units of a model split over the stages of a pipeline, as nanotron, Megatron-LM, torchtitan do.

`build_model` of nanotron (2025-02) goes through the model's blocks in order. A block is on the
stage at hand, and the next one begins once the cost so far is more than the stages up to here
should have. Costs are matrices: a layer costs the elements of its own, the head the vocabulary
times the hidden size, embedding and norms nothing (`get_block_compute_costs`; it takes keys and
values to have as many heads as queries). Norm, logits, their cast and the loss are blocks of their
own, so that a stage may be left with the loss alone, and is sent logits.

Megatron-LM (2026-08) gives every stage as many layers (`get_num_layers_to_build` of
`transformer/transformer_block.py`), the first one the embedding as well, the last one the head. A
stage may have several chunks of layers, which alternate with those of other stages: the layers of
chunk c of stage s come after those of chunk c of the stages before it (virtual stages, Narayanan
et al. 2021, section 2.2.2).

torchtitan (0.2.2) has as many stages on each rank, dealt out in the same turns. Embedding and head
count for some layers, and stages that come first have one more where it does not go round
(`generate_llm_fqn_per_model_part` of `distributed/pipeline_parallel.py`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from zsim.model.model import BATCH, Model, ModelError, Segment, Unit, Value
from zsim.strategy.runtime_options import RuntimeOptions
from zsim.strategy.strategy import Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Units of a stage that follow each other in the model: `given` and `sent` are handed on.

    Attributes:
        first: number of its first unit among those of the stage.
        model: its units alone.
        given: what its first unit reads of another stage; None where the model begins.
        sent: what its last unit makes for another stage; None where the model ends.
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
        """Return whether it needs the micro-batch: what embeds tokens, and what has the loss."""
        return any(
            BATCH in segment.inputs for unit in self.model.units for segment in unit.segments
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Units that one stage runs, as a model, in one chunk or several.

    `tied` are parameters that the first and the last stage both have: embeddings that are tied.
    """

    index: int
    model: Model
    chunks: tuple[Chunk, ...]
    tied: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        """The role that its ranks play."""
        return f"stage{self.index}"

    @property
    def handed_on(self) -> Iterator[Value]:
        """Yield what it sends of a micro-batch: what chunks made, gradients of what they read."""
        for chunk in self.chunks:
            yield from (each for each in (chunk.given, chunk.sent) if each is not None)


def in_blocks(model: Model) -> Model:
    """`model` with a unit for each block of which its last unit consists.

    A block ends with each segment up to the first that reads the batch: from there on it is the
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
    """Return what unit `index` counts for: elements of its matrices, over the tensor axis.

    The first unit of a transformer is its embedding.
    """
    if index == 0 and model.architecture is not None:
        return 0
    return model.count_of(each for each in model.units[index].parameters if len(each.shape) > 1)


def places(model: Model, count: int) -> list[int]:
    """Return the stage of each unit in nanotron."""
    return _dealt([cost(model, index) for index in range(len(model.units))], count)


def fewest_layers(model: Model, layers: int, strategy: Strategy) -> int:
    """Return the fewest of the `layers` of `model` that fill the stages."""
    count, even = strategy.parallel.pipeline, _even(strategy)
    if even is not None:
        return count * (even.layers_of_chunk or 1)
    weighed = _weighed(strategy)
    if weighed is not None:
        ends = weighed.layers_at_ends or (0, 0)
        return max(1, count * weighed.chunks_of_stage * max(1, *ends) - sum(ends))
    costs = [cost(model, index) for index in range(len(model.units))]
    return next(
        few
        for few in range(1, layers + 1)
        if _dealt(costs[: 1 + few] + costs[1 + layers :], count)[-1] == count - 1
    )


def _even(strategy: Strategy) -> RuntimeOptions | None:
    """Return the options of a runtime that deals out layers evenly; None of another."""
    runtime = strategy.zero.emulate
    return runtime if runtime is not None and runtime.even_stages else None


def _weighed(strategy: Strategy) -> RuntimeOptions | None:
    """Return the options of a runtime whose ends count for layers; None of another."""
    runtime = strategy.zero.emulate
    return runtime if runtime is not None and runtime.layers_at_ends is not None else None


def _dealt(costs: Sequence[int], count: int) -> list[int]:
    total, so_far, stage = sum(costs), 0, 0
    found: list[int] = []
    for each in costs:
        found.append(stage)
        so_far += each
        if so_far * count > total * (stage + 1):
            stage += 1
    return found


def even_places(model: Model, count: int, layers_of_chunk: int | None) -> list[int]:
    """Return the virtual stage of each unit, with as many layers on each.

    Chunk c of stage s is number c * `count` + s. Layers are what checkpointing treats alone.

    Raises:
        ModelError: layers cannot be dealt out so.
    """
    layers = [block[0].name for block in model.checkpointed_together if block[0].checkpoint]
    of_chunk = layers_of_chunk or max(1, len(layers) // count)
    chunks = len(layers) // (count * of_chunk)
    if not chunks or chunks * count * of_chunk != len(layers):
        by = f" x {of_chunk} of a virtual stage" if layers_of_chunk else ""
        raise ModelError(
            f"model.layers: {len(layers)} must be a multiple of parallel.pipeline = {count}{by}"
        )
    found: list[int] = []
    begun = 0
    names = set(layers)
    for unit in model.units:
        begun += unit.name in names
        found.append(min(max(begun - 1, 0) // of_chunk, chunks * count - 1))
    return found


def weighed_places(model: Model, count: int, ends: tuple[int, int]) -> list[int]:
    """Return the virtual stage of each unit among `count`, where `ends` count for so many layers.

    Raises:
        ModelError: there are too few layers.
    """
    layers = [block[0].name for block in model.checkpointed_together if block[0].checkpoint]
    first, last = ends
    each, more = divmod(len(layers) + first + last, count)
    if each < max(1, first, last):
        raise ModelError(
            f"model.layers: {len(layers)} are too few for {count} stages of a pipeline, of which "
            f"the first has {first} less and the last {last} less"
        )
    sizes = [each + (stage < more) for stage in range(count)]
    sizes[0] -= first
    sizes[-1] -= last
    ends_at = list(accumulate(sizes))
    found: list[int] = []
    begun, names = 0, set(layers)
    for unit in model.units:
        begun += unit.name in names
        if unit.name in names:
            found.append(next(stage for stage, end in enumerate(ends_at) if begun <= end))
        else:  # the embedding is on the first stage, what follows all layers on the last
            found.append(found[-1] if 0 < begun < len(layers) else 0 if not begun else count - 1)
    return found


def stages(model: Model, strategy: Strategy) -> tuple[Stage, ...]:
    """`model` split over the stages of a strategy.

    Raises:
        ModelError: a stage would have no unit, layers are not dealt out evenly, or more than one
            value would have to be handed on.
    """
    count, even = strategy.parallel.pipeline, _even(strategy)
    if even is not None:
        found = even_places(model, count, even.layers_of_chunk)
    elif (weighed := _weighed(strategy)) is not None:
        ends = weighed.layers_at_ends or (0, 0)
        found = weighed_places(model, count * weighed.chunks_of_stage, ends)
    else:
        found = places(model, count)
        if found[-1] != count - 1:
            raise ModelError(
                f"parallel.pipeline: {count} stages are more than the {found[-1] + 1} that the "
                f"{len(model.units)} blocks of the model fill"
            )
    in_v = (runtime := strategy.zero.emulate) is not None and runtime.stages_in_v
    ranks = [_rank_of(place, count, in_v=in_v) for place in found]
    tied = _tied(model, ranks, ends=even is not None)
    made: list[list[Chunk]] = [[] for _ in range(count)]
    given: Value | None = None
    for place in range(found[-1] + 1):
        own = made[_rank_of(place, count, in_v=in_v)]
        units = tuple(unit for unit, at in zip(model.units, found, strict=True) if at == place)
        part = _chunk_model(model, units, given)
        sent = part.loss if place < found[-1] else None
        first = sum(len(each.model.units) for each in own)
        own.append(Chunk(first=first, model=part, given=given, sent=sent))
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
    """Return the stage of a virtual stage: in turns, or in a V there and back."""
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
    """Return the units of a chunk as a model of their own.

    Raises:
        ModelError: they read what is not handed on.
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
            known |= {value.name for value in segment.outputs}
    return replace(model, units=units, given=(given,) if given else ())


def _tied(model: Model, found: list[int], *, ends: bool) -> frozenset[str]:
    """Return parameters that the first and the last stage both have, if the runtime ties `ends`.

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
