"""Plain settings, which a search simulates first: common starting points."""

from collections import defaultdict
from collections.abc import Iterator, Sequence, Set

from zsim.runtimes.lookup import search_of
from zsim_plan.search.space import SettingGroup

STAGES = frozenset({1, 3})
CHECKPOINTING = frozenset({"none", "full"})

MOST_TENSOR = 8
"""Maximum degree of the tensor axis in a plain setting."""

PIPELINE = 4
"""Degree of the pipeline axis in the last plain setting of a runtime."""

_Key = tuple[str, int, str]
"""Runtime, stage and checkpointing."""


def plainest(groups: Sequence[SettingGroup]) -> list[list[int]]:
    """Return for each runtime, stage and checkpointing the groups in the order to consider.

    The first that may fit is the plain setting with the fewest tensor, pipeline and context ranks.
    Ranks that share a sequence exchange keys in many small steps, which take long to simulate.
    """
    found = _usable(groups)
    return [sorted(found[key], key=lambda place: _plainness(groups[place])) for key in found]


def _plainness(group: SettingGroup) -> tuple[object, ...]:
    tensor, pipeline = _number(group, "parallel.tensor"), _number(group, "parallel.pipeline")
    context = _number(group, "parallel.context")
    return tensor * pipeline * context, context, tensor, pipeline, *_size(group)


def plain_settings(groups: Sequence[SettingGroup]) -> list[list[int]]:
    """Return the indices of groups whose defaults are plain settings, in the order to simulate.

    A plain setting keeps all states on the device, uses all GPUs, and has the smallest micro-batch
    and the default order of its pipeline. Each runtime has one for each of the stages 3 and 1, with
    full and with no checkpointing. The first list has as few tensor and pipeline ranks as possible,
    the second the tensor ranks of a node, the third also pipeline stages, both with the fewest
    ranks that share a sequence. If the question fixes other values, these are plain.
    """
    alike = _smallest(groups)
    context = min((_number(each, "parallel.context") for each in groups), default=1)
    found: list[list[int]] = [[], [], []]
    for key in sorted(alike, key=_order):
        of_degrees = alike[key]
        known: set[int] = set()
        for places, degrees in zip(found, _degrees(of_degrees.keys()), strict=False):
            place = of_degrees.get(degrees)
            if place is None or (known and _number(groups[place], "parallel.context") > context):
                continue  # its schedule takes long to simulate
            if place not in known:
                known.add(place)
                places.append(place)
    return found


def _order(key: _Key) -> tuple[object, ...]:
    runtime, stage, checkpointing = key
    return not search_of(runtime).comes_first, runtime, -stage, checkpointing != "full"


def _smallest(groups: Sequence[SettingGroup]) -> dict[_Key, dict[tuple[int, int], int]]:
    """Return the index of the plainest group by (runtime, stage, checkpointing), and by degrees."""
    found: dict[_Key, dict[tuple[int, int], int]] = {}
    for key, places in _usable(groups).items():
        of_degrees = found[key] = {}
        for place in sorted(places, key=lambda each: _size(groups[each])):
            group = groups[place]
            degrees = _number(group, "parallel.tensor"), _number(group, "parallel.pipeline")
            of_degrees.setdefault(degrees, place)
    return found


def _usable(groups: Sequence[SettingGroup]) -> dict[_Key, list[int]]:
    """Return the indices of plain groups by (runtime, stage, checkpointing), in the usual order."""
    gpus = max((each.fleet.gpus for each in groups), default=0)
    usable = [
        (place, group)
        for place, group in enumerate(groups)
        if group.fleet.gpus == gpus and not group.moves_states
    ]
    stages = {_number(group, "zero.stage") for _, group in usable}
    stages = stages & STAGES or stages
    modes = {_checkpointing(group) for _, group in usable if _number(group, "zero.stage") in stages}
    modes = modes & CHECKPOINTING or modes
    found: defaultdict[_Key, list[int]] = defaultdict(list)
    for place, group in usable:
        stage, mode = _number(group, "zero.stage"), _checkpointing(group)
        if stage in stages and mode in modes:
            found[group.runtime, stage, mode].append(place)
    return {key: found[key] for key in sorted(found, key=_order)}


def _size(group: SettingGroup) -> tuple[object, ...]:
    return (
        group.order is not None,
        _number(group, "parallel.context"),
        _number(group, "parallel.replicate"),
        _number(group, "train.micro_batch_size"),
    )


def _degrees(known: Set[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield tensor and pipeline degrees: the fewest, those of a node, and those with a pipeline."""
    yield min(known, key=lambda each: (each[0] * each[1], each))
    tensor = max((each for each, _ in known if each <= MOST_TENSOR), default=0)
    yield tensor, min((stages for each, stages in known if each == tensor), default=0)
    yield tensor, PIPELINE


def _checkpointing(group: SettingGroup) -> str:
    return str(group.changes["activations.checkpointing"])


def _number(group: SettingGroup, key: str) -> int:
    value = group.changes.get(key, 1)
    assert isinstance(value, int)
    return value
