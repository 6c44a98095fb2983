"""A model with routed experts, and plans of its training on ranks of several axes.

Each layer routes, copies rows for experts, runs them and adds up. Shared experts, auxiliary losses,
biases of experts, capacities, clipping and half precision are optional. `experts_schedule` writes
the schedule of a plan. With `whole`, every rank holds all experts of a layer instead, and tokens
stay (ZeRO-3 without expert parallelism).
"""

from dataclasses import dataclass

from zsim.dtype import DType
from zsim.model.experts import Drops, LoadScope
from zsim.model.model import BATCH, Model, Parameter, Segment, Unit, Value
from zsim.strategy.optimizer_rule import SGD, ClipNorm

HIDDEN, WIDE, WEIGHTS = 6, 4, 3
"""Elements of a hidden state, of a row, and of the weights of an expert."""
CLIP = ClipNorm(maximum=1.0)
BIAS = SGD(learning_rate=1e-3)
"""The rule of a bias of experts: any rule, since values are random functions of its constants."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Sizes of the training, and its parts.

    Attributes:
        ranks, data, tensor, stages: expert, data, tensor and pipeline ranks. Tensor ranks hold
            different tokens of a sequence, and copies of all parameters (sequence parallelism).
        drops: rows beyond a capacity; `padded` pads to it.
        auxiliary: the scope of an auxiliary loss of each layer.
        bias, shared: whether layers have a bias of experts, and a shared expert.
        recomputed: whether experts, and the exchange before them, run again before backward.
        clipped: whether gradients are clipped by their norm.
        half: whether a loss scale and a test for overflow are used.
    """

    ranks: int = 2
    data: int = 1
    tensor: int = 1
    stages: int = 1
    experts: int = 6
    layers: int = 2
    micro_batches: int = 2
    sent: int = 12
    whole: bool = False
    padded: bool = False
    drops: Drops | None = None
    auxiliary: LoadScope | None = None
    bias: bool = False
    shared: bool = False
    recomputed: bool = False
    clipped: bool = False
    half: bool = False

    @property
    def replicas(self) -> int:
        """Ranks with different data."""
        return self.ranks * self.data

    @property
    def sources(self) -> int:
        """Ranks of a stage with different tokens."""
        return self.replicas * self.tensor

    @property
    def divisor(self) -> int:
        """The number of losses of which training takes the mean."""
        return self.replicas * self.micro_batches

    def model(self) -> Model:
        """Return the model, whose values have the sizes of a replica."""
        units = [_unit("embed", (BATCH,), (_value("h0", HIDDEN),), embed=HIDDEN)]
        for layer in range(self.layers):
            units += self._layer(layer)
        last = f"h{self.layers}"
        units.append(_unit("loss", (last,), (_value("loss", 1),), head=HIDDEN))
        batch = Value(name=BATCH, elements=HIDDEN, dtype=DType.INT64, requires_gradient=False)
        return Model(name="experts by hand", units=tuple(units), batch=batch)

    def _layer(self, layer: int) -> list[Unit]:
        """Return the units of a layer: shared expert, routed experts, auxiliary loss."""
        units: list[Unit] = []
        before = f"h{layer}"
        if self.shared:
            made = _value(f"shared{layer}", HIDDEN)
            weights = {f"common{layer}": HIDDEN}
            units.append(_unit(f"shared{layer}", (before,), (made,), **weights))
        units.append(
            Unit(
                name=f"layer{layer}",
                parameters=self._parameters(layer),
                segments=self._segments(layer),
            )
        )
        if self.auxiliary is not None:
            loss = Segment(
                inputs=(f"scores{layer}", f"chosen{layer}"),
                outputs=(_value(f"auxiliary{layer}", 1),),
                loads=self.auxiliary,
            )
            units.append(Unit(name=f"auxiliary{layer}", parameters=(), segments=(loss,)))
        return units

    def _parameters(self, layer: int) -> tuple[Parameter, ...]:
        """Return the parameters of the routed experts of a layer."""
        found = (
            Parameter(name=f"router{layer}", shape=(HIDDEN,)),
            Parameter(name=f"experts{layer}", shape=(self.experts, WEIGHTS)),
        )
        if not self.bias:
            return found
        load = f"chosen{layer}"
        return (
            *found,
            Parameter(name=f"bias{layer}", shape=(self.experts,), frozen=True, load=load),
        )

    def _segments(self, layer: int) -> tuple[Segment, ...]:
        """Return router, permutation, experts, and the sum of results."""

        def kept(what: str, elements: int) -> Value:
            name = f"{what}{layer}"
            return Value(name=name, elements=elements, dtype=DType.INT64, requires_gradient=False)

        before, rows, out, mapped = (f"{name}{layer}" for name in ("h", "rows", "out", "map"))
        routed = [_value(f"probs{layer}", self.sent)]
        if self.auxiliary is not None:
            routed.append(_value(f"scores{layer}", self.experts))
        routed += [kept("chosen", self.experts)]
        if self.drops is not None:
            routed.append(kept("kept", self.experts))
        sent = routed[-1].name
        routed.append(kept("map", self.sent))
        read = (f"router{layer}", *([f"bias{layer}"] if self.bias else []))
        shared = [f"shared{layer}"] if self.shared else []
        return (
            Segment(inputs=(before,), outputs=tuple(routed), parameters=read, routes=sent),
            Segment(inputs=(before, mapped), outputs=(_value(rows, self.sent * WIDE),)),
            Segment(
                inputs=(rows, f"probs{layer}"),
                outputs=(_value(out, self.sent * WIDE),),
                parameters=(f"experts{layer}",),
                experts=self.experts,
                drops=self.drops,
            ),
            Segment(
                inputs=(before, out, *shared, mapped),
                outputs=(_value(f"h{layer + 1}", HIDDEN),),
            ),
        )


def _value(name: str, elements: int) -> Value:
    return Value(name=name, elements=elements, dtype=DType.FP32)


def _unit(
    name: str, inputs: tuple[str, ...], outputs: tuple[Value, ...], **parameters: int
) -> Unit:
    return Unit(
        name=name,
        parameters=tuple(Parameter(name=each, shape=(n,)) for each, n in parameters.items()),
        segments=(Segment(inputs=inputs, outputs=outputs, parameters=tuple(parameters)),),
    )
