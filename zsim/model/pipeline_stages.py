"""Units of a model split over the stages of a pipeline, as nanotron does (2025-02).

`build_model` of nanotron goes through the model's blocks in order. A block is on the stage at hand,
and the next one begins once the cost so far is more than the stages up to here should have. Costs
are matrices: a layer costs the elements of its own, the head the vocabulary times the hidden size,
embedding and norms nothing (`get_block_compute_costs`; it takes keys and values to have as many
heads as queries). Norm, logits, their cast and the loss are blocks of their own, so that a stage
may be left with the loss alone, and is sent logits.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from zsim.model.model import BATCH, Model, ModelError, Segment, Unit, Value


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Units that one stage runs, as a model: `given` and `sent` are what stages hand on.

    The first stage is given nothing, and the last one sends nothing.
    """

    index: int
    model: Model
    given: Value | None
    sent: Value | None

    @property
    def name(self) -> str:
        """The role that its ranks play."""
        return f"stage{self.index}"

    @property
    def reads_batch(self) -> bool:
        """Return whether a stage needs the micro-batch.

        The first one, and the one with the loss.
        """
        return any(
            BATCH in segment.inputs for unit in self.model.units for segment in unit.segments
        )


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
    """Return the stage of each unit."""
    return _dealt([cost(model, index) for index in range(len(model.units))], count)


def fewest_layers(model: Model, layers: int, count: int) -> int:
    """Return the fewest of the `layers` of `model` that fill the stages."""
    costs = [cost(model, index) for index in range(len(model.units))]
    return next(
        few
        for few in range(1, layers + 1)
        if _dealt(costs[: 1 + few] + costs[1 + layers :], count)[-1] == count - 1
    )


def _dealt(costs: Sequence[int], count: int) -> list[int]:
    total, so_far, stage = sum(costs), 0, 0
    found: list[int] = []
    for each in costs:
        found.append(stage)
        so_far += each
        if so_far * count > total * (stage + 1):
            stage += 1
    return found


def stages(model: Model, count: int) -> tuple[Stage, ...]:
    """`model` split over so many stages.

    Raises:
        ModelError: a stage would have no unit, or more than one value would have to be handed on.
    """
    found = places(model, count)
    if found[-1] != count - 1:
        raise ModelError(
            f"parallel.pipeline: {count} stages are more than the {found[-1] + 1} that the "
            f"{len(model.units)} blocks of the model fill"
        )
    _need_apart(model, found)
    made: list[Stage] = []
    given: Value | None = None
    for index in range(count):
        units = tuple(
            unit for unit, place in zip(model.units, found, strict=True) if place == index
        )
        own = _stage_model(model, units, given)
        sent = own.loss if index < count - 1 else None
        made.append(Stage(index=index, model=own, given=given, sent=sent))
        given = sent
    return tuple(made)


def _stage_model(model: Model, units: tuple[Unit, ...], given: Value | None) -> Model:
    """Return the units of a stage as a model of their own.

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


def _need_apart(model: Model, found: list[int]) -> None:
    """Return if no two stages have a parameter in common.

    Raises:
        ModelError: some do.
    """
    owner: dict[str, int] = {}
    for unit, stage in zip(model.units, found, strict=True):
        for parameter in unit.parameters:
            other = owner.setdefault(parameter.name, stage)
            if other != stage:
                if unit.module:
                    raise ModelError(
                        f"model.hidden_groups: {unit.module} would be on stages {other} and "
                        f"{stage} of the pipeline"
                    )
                raise ModelError(
                    f"model.tied_embeddings: true puts {parameter.name} on stages {other} and "
                    f"{stage} of the pipeline, and the sum of its gradients over stages is not "
                    "modelled, allowed is false"
                )
