"""Lower bounds of the memory of a micro-batch, from the end of its forward to that of its backward.

Units run backward from the last one on. At the backward of a unit, the activations of earlier units
are kept, and the gradients of later units exist.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from zsim.closed_form.by_model import alike_units, kept_by_model
from zsim.closed_form.checkpoint import goes_back, recomputed
from zsim.closed_form.stored_layers import stored
from zsim.dtype import DType
from zsim.model.model import BATCH, Model, Parameter, Segment, Unit, Value
from zsim.runtimes.search import KeptBytes
from zsim.strategy.execution import TokenFusion
from zsim.strategy.strategy import Strategy

COUNTED = 0.99
"""Minimum fraction of the bytes that experts save in proportion to their rows.

Numbers of rows are rounded, and experts also save counts."""


@dataclass(frozen=True, slots=True)
class ActivationBytes:
    """Lower bounds of the bytes of a micro-batch: kept for its backward, while it runs, and after.

    Counted at the `peak` are activations that are kept or recomputed, and the workspace, gradients
    and gathered parameters of one unit. The first and last units of each kind are considered.
    Memory of the runtime that depends on how far the backward is counts in `peak` and `end`.
    """

    kept: int
    peak: int
    end: int


def backward_bytes(
    model: Model, strategy: Strategy, runtime: KeptBytes, busiest: float
) -> ActivationBytes:
    """Return the bytes of a micro-batch of a model, or of a chunk of a pipeline stage."""
    again = recomputed(model, strategy)
    away = {unit.name for unit in stored(model, strategy)}
    ends = dict[tuple[int, bool], list[str]]()
    for first, names in alike_units(model):
        for name in names:
            ends.setdefault((id(first), name in again), []).append(name)
    chosen = {name for names in ends.values() for name in (*names[:2], *names[-2:])} - away
    held = _HeldByRuntime(model, strategy, runtime, again)
    most, kept = 0, _KeptActivations(model, strategy, busiest)
    before = list[int]()
    for place, unit in enumerate(model.units):
        before.append(kept.size_bytes)
        if unit.name in chosen:
            own = kept.peak_of(unit, is_gathered=held.gathers_segments(unit))
            most = max(most, kept.size_bytes + own + held.at(place))
        if unit.name not in away:
            kept.add(unit, again=unit.name in again)
    most = max(most, kept.size_bytes + held.after_forward, held.first_reduction(before))
    return ActivationBytes(kept.size_bytes, most, held.end)


class _HeldByRuntime:
    """Memory that a runtime holds at the backward of each unit, without states and activations.

    In pipelines only gathered parameters are counted. Parameters that several units use are not.
    """

    def __init__(
        self, model: Model, strategy: Strategy, runtime: KeptBytes, again: set[str]
    ) -> None:
        is_alone = strategy.parallel.pipeline == 1
        self._units = model.units
        self._strategy = strategy
        self._again = again
        self._back = {unit.name for unit in model.units if goes_back(model, unit)}
        self._compute = strategy.train.precision.compute
        self._runtime = runtime if is_alone else KeptBytes(gathered=runtime.gathered)
        self._wraps = is_alone and strategy.zero.emulate is not None
        uses = Counter(each.name for unit in model.units for each in unit.parameters)
        self._own = [
            [each for each in unit.parameters if uses[each.name] == 1] for unit in model.units
        ]
        self._trained = [sum(each.elements for each in own if not each.frozen) for own in self._own]
        self._all = sum(self._trained)
        self._after = _after_each(self._trained)
        """Trained elements of later units."""

    def _is_gathered(self, unit: Unit) -> bool:
        """Return True if the parameters of a unit are gathered for its backward."""
        kind = "blocks" if unit.checkpoint else "root"
        return self._strategy.zero.stage == 3 and kind not in self._runtime.gathered

    def gathers_segments(self, unit: Unit) -> bool:
        """Return True if the parameters of one segment of a unit are gathered at a time."""
        return self._is_gathered(unit) and not self._wraps

    def at(self, place: int) -> int:
        """Return the bytes at the backward of the unit at `place`."""
        unit, runtime, after = self._units[place], self._runtime, self._after[place]
        found = runtime.done * after + runtime.cast * self._cast(place)
        if not runtime.reduces_last:
            found += runtime.bucket_bytes
        if after:
            found += runtime.begun * self._all
        if runtime.done_shard or runtime.reducing:
            found += self._reduced(place)
        if self._wraps and self._is_gathered(unit):
            found += gathered_bytes(unit.parameters, self._compute)
        if runtime.gathered and self._wraps:
            found += self._whole(place)
        if self._wraps and "ahead" in runtime.gathered and "blocks" not in runtime.gathered:
            blocks = (each.parameters for each in self._units[:place] if each.checkpoint)
            sizes = [gathered_bytes(each, self._compute) for each in blocks]
            found += min(sizes, default=0)
        return found + self._prefetched(place)

    def _whole(self, place: int) -> int:
        """Return the bytes of parameters that stay gathered until the backward of their unit.

        The root is gathered until the end of the backward.
        """
        kept = {
            each.name: each
            for number, unit in enumerate(self._units)
            if ("blocks" if unit.checkpoint else "root") in self._runtime.gathered
            and (number <= place or not unit.checkpoint)
            for each in unit.parameters
        }
        return gathered_bytes(kept.values(), self._compute)

    def _cast(self, place: int) -> int:
        """Return the elements of weights that are cast at the backward of a unit."""
        units = zip(self._units[: place + 1], self._trained, strict=False)
        kept = sum(each for unit, each in units if unit.name not in self._again)
        return kept + (self._trained[place] if self._units[place].name in self._again else 0)

    def _reduced(self, place: int) -> int:
        """Return the bytes of gradients of later units: shards of blocks, and of the root whole.

        The latest block has also left the input of its reduction.
        """
        later = [*zip(self._units, self._own, self._trained, strict=True)][place + 1 :]
        blocks = [own for unit, own, _ in later if unit.checkpoint]
        found = sum(shard_of(each, self._strategy) for each in blocks) * self._runtime.done_shard
        root = sum(trained for unit, _, trained in later if not unit.checkpoint)
        found += root * self._compute.size_bytes
        if self._units[place + 1 : place + 2] and self._units[place + 1].checkpoint:
            dense = [each for each in blocks[0] if not (each.frozen or each.expert)]
            found += self._runtime.reducing * sum(each.elements for each in dense)
        return found

    def _prefetched(self, place: int) -> int:
        """Return the bytes of parameters of earlier units that are whole or gathered ahead.

        After forward, parameters are whole that are used again within `reused` elements. Then each
        unit frees its own, and gathers `ahead` elements, unless more than `live` are whole.
        """
        runtime = self._runtime
        quantized = any(each.quantized is not None for own in self._own for each in own)
        if not runtime.reused or quantized or not self._wraps:
            return 0
        visited = [sum(each.elements for each in unit.parameters) for unit in self._units]
        own = [
            sum(each.elements for each in parameters) if unit.name in self._back else 0
            for unit, parameters in zip(self._units, self._own, strict=True)
        ]
        later = _after_each(visited)
        reused = sum(
            each for each, after in zip(own, later, strict=True) if 2 * after < runtime.reused
        )
        turns = len(self._units) - 1 - place
        left = reused - later[place] - visited[place] + turns * runtime.ahead
        most = runtime.live - runtime.ahead - 2 * max(visited)
        return self._compute.size_bytes * max(0, min(sum(own[:place]), left, most))

    @property
    def after_forward(self) -> int:
        """Bytes after the last forward."""
        return self._runtime.cast * self._all

    def first_reduction(self, kept_before: Sequence[int]) -> int:
        """Return the bytes when a full bucket is reduced first, during backward.

        `kept_before` has the bytes of activations of the units before each unit. A bucket is
        reduced before the gradient that does not fit.
        """
        runtime, filled, largest = self._runtime, 0, 0
        if not runtime.bucket or runtime.reduces_last or self._strategy.has_expert_order:
            return 0
        for place in reversed(range(len(self._units))):
            sizes = [each.elements for each in self._units[place].parameters if not each.frozen]
            fitting = [each for each in sizes if each <= runtime.bucket]
            largest = max(largest, *fitting, 0)
            filled = filled + self._trained[place] if len(fitting) == len(sizes) else 0
            if filled > runtime.bucket:
                copied = runtime.copied * (runtime.bucket - largest)
                held = runtime.bucket_bytes + copied + runtime.begun * self._all
                return kept_before[place] + held + self._prefetched(place)
        return 0

    @property
    def end(self) -> int:
        """Bytes after the last backward, when gradients that are left are reduced."""
        runtime, copied = self._runtime, 0
        trained = {
            each.name: each.elements
            for unit in self._units
            for each in unit.parameters
            if not each.frozen
        }
        if self._strategy.has_expert_order:
            copied = 0  # gradients of experts are reduced apart
        elif sum(trained.values()) <= runtime.bucket:
            copied = self._all
        elif runtime.reduces_last:
            most = max(trained.values())
            copied = max(most, runtime.bucket - most)
        held = (runtime.begun + runtime.done) * self._all + runtime.copied * copied
        return held + runtime.bucket_bytes


def _after_each(sizes: Sequence[int]) -> list[int]:
    """Return for each size the sum of all later sizes."""
    return [*accumulate(reversed(sizes[1:]), initial=0)][::-1]


class _KeptActivations:
    """Activations of a micro-batch that units keep for their backward."""

    def __init__(self, model: Model, strategy: Strategy, busiest: float) -> None:
        self.size_bytes = 0
        self._times = 1 + (busiest - 1) * COUNTED
        self._model = model
        self._compute = strategy.train.precision.compute
        self._moves_checkpoints = strategy.moves_checkpoints
        self._gathers = strategy.execution.fuses_tokens is not TokenFusion.USERBUFFERS
        self._scale = model.tensor if self._gathers else 1
        self._inputs = {BATCH}

    def add(self, unit: Unit, *, again: bool) -> None:
        """Add the activations of a unit; if it is recomputed `again`, only its inputs."""
        if again:
            own = {value.name for segment in unit.segments for value in segment.outputs}
            given = {name for segment in unit.segments for name in segment.inputs} - own
            self._add_inputs(set() if self._moves_checkpoints else given)
            return
        reruns = [each for each in unit.segments if each.reruns]
        dropped = {value.name for each in reruns for value in each.outputs}
        for segment in unit.segments:
            if self._model.runs_backward(segment):
                self.size_bytes += 0 if segment.reruns else self._saved(segment)
                self._add_inputs(set(segment.kept_inputs) - dropped)

    def _saved(self, segment: Segment) -> int:
        """Return the saved bytes of a segment; experts save rows that their rank received."""
        receives = segment.swaps and self._model.values[segment.inputs[0]].copies > 0
        return int(self._times * segment.saved_bytes) if receives else segment.saved_bytes

    def _add_inputs(self, names: set[str]) -> None:
        new = names - self._inputs
        self._inputs |= new
        self.size_bytes += sum(self._model.values[name].size_bytes for name in new)

    def _exchanged_bytes(self, segment: Segment) -> int:
        """Return the bytes of gradients of a segment, and of tensors gathered from tensor ranks.

        Userbuffers hold gathered tensors, and are not counted.
        """
        model, total = self._model, 0
        for value in segment.outputs:
            if value.requires_gradient:
                is_whole = segment.sums and value.tensor_sharded
                total += value.size_bytes + (self._whole_bytes(value, segment) if is_whole else 0)
        for value in map(model.values.__getitem__, segment.inputs):
            is_whole = segment.reads_gathered and value.tensor_sharded
            if value.requires_gradient:
                scale = self._scale if is_whole and segment.sums_gradients else 1
                total += scale * value.size_bytes
            if is_whole and segment.saves_input:
                total += self._whole_bytes(value, segment)
        return total

    def _whole_bytes(self, value: Value, segment: Segment) -> int:
        """Return the bytes of a tensor gathered over the tensor axis; a cast leaves a byte each."""
        own = value.elements if segment.is_narrow else value.size_bytes
        return own * self._model.tensor * self._gathers

    def peak_of(self, unit: Unit, *, is_gathered: bool) -> int:
        """Return the bytes that the backward of a unit needs beyond those kept before it.

        They include gradients of its parameters, and with `is_gathered` parameters of one segment.
        """
        model, saved, inputs, most = self._model, 0, set[str](), 0
        trained = sum(each.elements for each in unit.parameters if not each.frozen)
        gradients = trained * self._compute.size_bytes
        parameters = {each.name: each for each in unit.parameters}
        for segment in unit.segments:
            if not model.runs_backward(segment):
                continue
            saved += self._saved(segment)
            inputs |= set(segment.kept_inputs) - self._inputs
            own = [parameters[name] for name in segment.parameters if name in parameters]
            needed = segment.backward_workspace_bytes
            needed += gathered_bytes(own, self._compute) if is_gathered else 0
            needed += self._exchanged_bytes(segment)
            kept = sum(model.values[name].size_bytes for name in inputs)
            most = max(most, saved + kept + needed + gradients)
        return most


def gathered_bytes(parameters: Iterable[Parameter], compute: DType) -> int:
    """Return the bytes of gathered parameters."""
    return sum(
        each.elements * (DType.FP8 if each.float8 else compute).size_bytes for each in parameters
    )


def elements_of(model: Model) -> tuple[int, int]:
    """Return the elements of all parameters and of trained parameters."""
    return kept_by_model(model, "elements", lambda: _elements_of(model))


def _elements_of(model: Model) -> tuple[int, int]:
    held = sum(each.elements for each in model.parameters)
    return held, held - sum(each.elements for each in model.parameters if each.frozen)


def shard_of(parameters: Iterable[Parameter], strategy: Strategy) -> int:
    """Return a lower bound of a rank's elements of those parameters that are trained."""
    trained = [each for each in parameters if not each.frozen]
    experts = sum(each.elements for each in trained if each.expert)
    dense = sum(each.elements for each in trained) - experts
    if not strategy.has_expert_order:
        return (dense + experts) // strategy.parallel.data
    return dense // strategy.parallel.data + experts // strategy.expert_data
