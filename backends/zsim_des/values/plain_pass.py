"""One micro-batch forward and backward, computed directly on all ranks that exchange data.

This module reads no schedule: ranks of the tensor axis, and ranks that share sequences, run in
lockstep.
"""

from collections.abc import Sequence

import numpy as np

from zsim.model.generator import Draws
from zsim.model.model import BATCH, Model, Segment, Unit
from zsim_des.values import stand_in
from zsim_des.values.field import Numbers, reduced
from zsim_des.values.truth import data, mask

Tensors = list[dict[str, Numbers]]
"""Tensors by name, for each rank of the tensor axis."""


def trainable(model: Model) -> frozenset[str]:
    """Return the names of the parameters that are not frozen."""
    return frozenset(each.name for each in model.parameters if not each.frozen)


class PlainPass:
    """One micro-batch on one replica: forward through all units, and backward.

    Replicas that share sequences run together: there is one place per rank of the tensor axis for
    each replica in `which`.
    """

    def __init__(
        self, model: Model, parameters: Tensors, which: Sequence[tuple[int, int, int]]
    ) -> None:
        self._model = model
        self._which = [each for each in which for _ in range(model.tensor)]
        self._parameters = parameters * len(which)
        self._places = range(len(self._which))
        self._values: Tensors = [{BATCH: data(*each, model.batch.elements)} for each in self._which]
        self._saved: list[dict[tuple[str, int], float]] = [{} for _ in self._places]
        self._slopes: Tensors = [{model.loss.name: np.ones(1)} for _ in self._places]
        self._trainable = trainable(model)
        self.gradients: Tensors = [
            {name: np.zeros(len(each)) for name, each in own.items() if name in self._trainable}
            for own in self._parameters
        ]
        for unit in model.units:
            for position in range(len(unit.segments)):
                self._forward(unit, position)
        self.losses = [float(own[model.loss.name][0]) for own in self._values[:: model.tensor]]
        for unit in reversed(model.units):
            for position in reversed(range(len(unit.segments))):
                if self._is_differentiated(unit.segments[position]):
                    self._backward(unit, position)

        self._add_up_copies()

    def _is_differentiated(self, segment: Segment) -> bool:
        """Return True if a segment has a backward: it trains parameters or passes a gradient on."""
        asked = any(value.requires_gradient for value in segment.outputs)
        return asked or not self._trainable.isdisjoint(segment.parameters)

    def _add_up_copies(self) -> None:
        """Sum gradients of copies of parameters, of a rank's own tokens or heads, over the axis."""
        summed = self._model.summed_copies if self._model.tensor > 1 else frozenset[str]()
        for name in (each.name for each in self._model.parameters):
            if name in summed and name in self._trainable:
                for places in map(self._tensor_peers, self._places[:: self._model.tensor]):
                    gradients = [self.gradients[place] for place in places]
                    total = reduced(np.sum([own[name] for own in gradients], axis=0))
                    for own in gradients:
                        own[name] = total

    def _tensor_peers(self, place: int) -> range:
        """Return the places of the tensor axis with the same data."""
        ranks = self._model.tensor
        return range(place - place % ranks, place - place % ranks + ranks)

    def _sharing(self, place: int) -> range:
        """Return the places with the same parameter parts whose replicas share sequences."""
        return self._places[place % self._model.tensor :: self._model.tensor]

    def _cut(self, name: str) -> bool:
        return self._model.values[name].tensor_sharded

    def _inputs(self, place: int, segment: Segment) -> list[Numbers]:
        """Return the inputs of a segment: the rank's own parts, gathered if read whole.

        The last input may be gathered from all places that share the sequences.
        """
        whole = segment.reads_gathered
        read = [
            self._together(self._values, name, self._tensor_peers(place))
            if whole and self._cut(name)
            else self._values[place][name]
            for name in segment.inputs
        ]
        if segment.shared_input is not None:
            read[-1] = self._together(self._values, segment.inputs[-1], self._sharing(place))
        elif segment.offset:
            read[-1] = self._values[self._passing(place, segment)][segment.inputs[-1]]
        return read

    def _together(self, tensors: Tensors, name: str, places: range) -> Numbers:
        return np.concatenate([tensors[place][name] for place in places])

    def _elements(self, names: Sequence[str], *, whole: bool) -> list[int]:
        values = [self._model.values[name] for name in names]
        ranks = self._model.tensor
        return [
            value.elements * (ranks if whole and value.tensor_sharded else 1) for value in values
        ]

    def _own(self, made: list[list[Numbers]], names: Sequence[str]) -> list[list[Numbers]]:
        """Sum over the tensor axis; each place keeps its own tokens of values that are sharded."""
        ranks = self._model.tensor
        sums = [_sum([made[each] for each in self._tensor_peers(place)]) for place in self._places]
        for place, own in enumerate(sums):
            for index, name in enumerate(names):
                if self._cut(name):
                    own[index] = np.split(own[index], ranks)[place % ranks]
        return sums

    def _own_tokens(self, made: Sequence[Sequence[Numbers]]) -> list[Numbers]:
        """Sum the last gradients over places that share sequences; each keeps its own tokens."""
        found: list[Numbers] = []
        for place in self._places:
            sharing = self._sharing(place)
            total = reduced(np.sum([made[each][-1] for each in sharing], axis=0))
            found.append(np.split(total, len(sharing))[sharing.index(place)])
        return found

    def _forward(self, unit: Unit, position: int) -> None:
        segment = unit.segments[position]
        made: list[list[Numbers]] = []
        for place in self._places:
            name, drawn = f"{unit.name}/{position}", ""
            if segment.draws is not None:
                apart = segment.draws is Draws.APART
                own = place % self._model.tensor if apart else None
                drawn = mask(self._which[place], name, own)
            done = stand_in.forward(
                f"{name}{drawn}",
                self._inputs(place, segment),
                [self._parameters[place][name] for name in segment.parameters],
                self._elements([value.name for value in segment.outputs], whole=segment.sums),
            )
            made.append(done.outputs)
            self._saved[place][unit.name, position] = done.saved
        if segment.sums:
            made = self._own(made, [value.name for value in segment.outputs])
        for place, outputs in enumerate(made):
            for value, output in zip(segment.outputs, outputs, strict=True):
                self._values[place][value.name] = output

    def _backward(self, unit: Unit, position: int) -> None:
        segment = unit.segments[position]
        wanted = [name for name in segment.inputs if self._model.values[name].requires_gradient]
        made: list[list[Numbers]] = []
        for place in self._places:
            done = self._backward_on(place, unit, position, wanted)
            made.append(done.inputs)
            own = self.gradients[place]
            for name, gradient in zip(segment.parameters, done.parameters, strict=True):
                if name in own:
                    own[name] = reduced(own[name] + gradient)
        ranks = self._model.tensor
        if self._wants_shared(segment, wanted):
            for gradients, own_tokens in zip(made, self._own_tokens(made), strict=True):
                gradients[-1] = own_tokens
        elif segment.offset and segment.inputs[-1] in wanted:
            last = [own[-1] for own in made]
            for place, gradients in enumerate(made):
                gradients[-1] = last[self._passing(place, segment, way=1)]
        elif segment.sums_gradients:
            made = self._own(made, wanted)
        elif segment.reads_gathered:
            made = [
                [
                    np.split(each, ranks)[place % ranks] if self._cut(name) else each
                    for name, each in zip(wanted, gradients, strict=True)
                ]
                for place, gradients in enumerate(made)
            ]
        for place, gradients in enumerate(made):
            slopes = self._slopes[place]
            for name, gradient in zip(wanted, gradients, strict=True):
                slopes[name] = reduced(slopes[name] + gradient) if name in slopes else gradient

    def _passing(self, place: int, segment: Segment, way: int = -1) -> int:
        """Return the place that sends a segment its last input; with `way=1`, the receiving one."""
        sharing = self._sharing(place)
        other = sharing.index(place) + way * (segment.offset or 0)
        return sharing[other % len(sharing)]

    def _wants_shared(self, segment: Segment, wanted: Sequence[str]) -> bool:
        """Return True if the last gradient covers the tokens of all that share sequences."""
        return segment.shared_input is not None and segment.inputs[-1] in wanted

    def _backward_on(
        self, place: int, unit: Unit, position: int, wanted: Sequence[str]
    ) -> stand_in.Backward:
        segment: Segment = unit.segments[position]
        slopes = {
            value.name: self._together(self._slopes, value.name, self._tensor_peers(place))
            if segment.sums and value.tensor_sharded
            else self._slopes[place][value.name]
            for value in segment.outputs
            if value.name in self._slopes[place]
        }
        saved = self._saved[place][unit.name, position]
        sizes = self._elements(wanted, whole=segment.reads_gathered)
        if self._wants_shared(segment, wanted):
            sizes[-1] *= len(self._sharing(place))
        return stand_in.backward(
            f"{unit.name}/{position}",
            inputs=self._inputs(place, segment)[segment.adds :] if segment.saves_input else [],
            saved=[np.array([saved])] if segment.saved_bytes else [],
            parameters=[self._parameters[place][name] for name in segment.parameters],
            slope=stand_in.slope_of(
                f"{unit.name}/{position}",
                [slopes[value.name] for value in segment.outputs if value.name in slopes],
            ),
            sizes=sizes,
        )


def _sum(made: Sequence[Sequence[Numbers]]) -> list[Numbers]:
    """Sum the outputs of several places."""
    return [reduced(np.sum(parts, axis=0)) for parts in zip(*made, strict=True)]
