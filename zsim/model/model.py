"""The trained model: units of parameters and segments, as one tensor rank sees them.

A `Model` is resolved: micro-batch size, sequence length, tensor degree and precision are fixed, so
every size is a number. It describes the values between segments and the cost of each segment, not
how data-parallel ranks shard them.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import groupby
from math import prod
from typing import ClassVar

from zsim.dtype import DType, Quantization
from zsim.model.architecture import Architecture
from zsim.model.experts import Drops, LoadScope
from zsim.model.generator import Draws
from zsim.model.kernel import Kernel
from zsim.model.segment_exchange import (
    ExchangeAxis,
    ExchangeKind,
    SegmentExchange,
    exchanges_of,
    is_narrow,
    sums_gradients,
)
from zsim.model.tensor_lifetime import AllocationEvent
from zsim.model.token_loads import Routing


class ModelError(ValueError):
    """A model that cannot exist; the message starts with the name of the field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One weight tensor, with its shape on one rank of the tensor axis.

    If `tensor_sharded`, ranks of the tensor axis hold different parts of it; otherwise they hold
    copies. If it `serves_own_heads`, ranks hold copies that each applies to its own heads, so that
    gradients are partial sums over the tensor axis. If `frozen`, it is read but not trained
    (`requires_grad` is False), and has neither a gradient nor optimizer state. If `float8`, it is
    cast to 8-bit floats, with one scale, before it is gathered. A `quantized` parameter is kept in
    4 bits with scales; segments that read it dequantize it first. If it stacks the weights of
    routed `experts`, that is their number on this rank, the extent of its first dimension; 0 for
    all other parameters, such as routers and shared experts. Expert ranks hold different
    experts, and expert-tensor ranks parts of them, whatever `tensor_sharded` says.
    A bias of experts is frozen, and names a `load`: a value with the rows of each expert. After
    every step it is updated from the sum of this value over all ranks and micro-batches. Built
    models have it among the `biases` of a unit, outside of buckets and of numbers of parameters.
    """

    name: str
    shape: tuple[int, ...]
    tensor_sharded: bool = False
    serves_own_heads: bool = False
    frozen: bool = False
    float8: bool = False
    quantized: Quantization | None = None
    experts: int = 0
    load: str = ""

    def __post_init__(self) -> None:
        if self.load and not self.frozen:
            raise ModelError(f"parameter {self.name}: load {self.load} needs frozen")
        if self.experts and (not self.shape or self.shape[0] != self.experts):
            raise ModelError(
                f"parameter {self.name}: experts {self.experts} must be the extent of its first "
                "dimension"
            )

    @property
    def expert(self) -> bool:
        """Return True if it stacks the weights of routed experts."""
        return self.experts > 0

    @property
    def elements(self) -> int:
        """Elements on one rank of the tensor axis or, for experts, of the expert axes."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A tensor that flows between segments: `elements` of `dtype` for one micro-batch, on one rank.

    If `tensor_sharded`, ranks of the tensor axis hold different parts of it: tokens (sequence
    parallelism, Korthikanti et al. 2022, section 4.2.2), or logits of a part of the vocabulary;
    otherwise they hold copies. A segment that reduces its outputs scatters such an output. A
    segment that reduces the gradients of its inputs gathers such an input, and scatters the
    gradient. A segment that gathers its inputs keeps its own part of the gradient instead.

    A value with `copies` has that many rows, copies of tokens for experts, if tokens are balanced;
    otherwise their number depends on the data.
    """

    omitted_defaults: ClassVar[frozenset[str]] = frozenset({"copies"})

    name: str
    elements: int
    dtype: DType
    requires_gradient: bool = True
    tensor_sharded: bool = False
    copies: int = 0

    @property
    def size_bytes(self) -> int:
        """Bytes for one micro-batch on one rank."""
        return self.elements * self.dtype.size_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitBackward:
    """Costs of the backward of a segment in two parts: gradients of inputs, then of parameters.

    The first part keeps for the second the output gradients of operators with parameters.

    Attributes:
        intermediate_bytes: bytes of these gradients.
        inputs, weights: kernels of each part.
        input_workspace_bytes, weight_workspace_bytes: as for the directions of a segment.
        input_course, weight_course: allocations of each part. Buffers by number are the workspace,
            saved tensors, those gradients, then gradients of each input, or parameter.
    """

    intermediate_bytes: int
    inputs: tuple[Kernel, ...]
    weights: tuple[Kernel, ...]
    input_workspace_bytes: int = 0
    weight_workspace_bytes: int = 0
    input_course: tuple[AllocationEvent, ...] = ()
    weight_course: tuple[AllocationEvent, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Part of a unit between exchanges with other ranks.

    At most one exchange precedes it (`begins`), and one follows it (`ends`). Files describe them by
    ten fields, `reduces_output` to `adds_experts`; nothing else reads these.

    Attributes:
        inputs: names of the values it reads; "batch" is the micro-batch of data.
        outputs: values it computes.
        parameters: names of the unit's parameters it reads, in the order of the unit; backward
            computes gradients of all that are not frozen.
        saved_bytes: bytes it keeps for its backward beyond its inputs and parameters.
        saves_input: whether its backward reads its inputs.
        forward_workspace_bytes, backward_workspace_bytes: maximum that it holds at once while it
            runs, beyond inputs, outputs, saved tensors, and their and its parameters' gradients.
        reduces_output: outputs are partial sums over the tensor axis, reduced after forward.
        reduces_input_gradient: input gradients are partial sums over the tensor axis, reduced
            after backward.
        gathers_input: inputs are gathered, and every rank of the tensor axis computes the same
            outputs and the same gradient of the inputs.
        leaves_whole: the next segment's forward also reads the inputs that this forward gathered,
            so they are not gathered again.
        casts_tokens: tokens that it gathers over the tensor axis are first cast to 8-bit floats,
            and so are gradients of the tokens that it scatters.
        gathers_context: the last input is gathered from all ranks that share a sequence, and its
            gradient is a partial sum over these ranks.
        context_offset: the last input comes from the rank this many places before in the group
            that shares a sequence, 0 for the own one; None if it is not exchanged.
        swaps_output: outputs with copies of tokens are exchanged over expert ranks after forward:
            block j goes to rank j; so are their gradients before backward.
        joins_experts: inputs are gathered from all ranks that run experts of its tokens, and
            their gradients are partial sums over these ranks.
        adds_experts: outputs are partial sums over these ranks; each keeps the sums of its tokens.
        side: it runs on a side stream, while tokens of experts are exchanged.
        reruns: it keeps nothing for its backward, and runs again before it; so do its outputs.
        adds: the first input is added to the output, so backward does not read it.
        draws: how its forward draws random numbers, as for dropout; None if it draws none.
        forward, backward: kernels of each direction.
        again: kernels of a forward that recomputes a checkpoint; empty if all of them run.
        runs_again: whether it runs when a checkpoint is recomputed; recomputation that stops early
            does not reach segments that save nothing.
        sums_again: whether recomputed outputs are reduced over the tensor axis, if outputs are.
        forward_course, backward_course: allocations and frees of single tensors in each direction,
            in order; empty if not known. Buffers by number are the workspace, saved tensors, then
            gradients of each parameter and of each input.
        experts: number of experts whose weights its parameters stack, if it treats each row by
            itself, with the weights of the row's expert; None for any other segment.
        drops: the rows that are dropped before a segment of experts, or before a segment sends rows
            to experts or back; None if there are none.
        routes: the output with the numbers of rows that it sends to each expert, if it chooses
            experts. If it also exchanges rows, ranks gather this output, and hosts read it.
            Recomputation does not run such a segment, unless the contract says so.
        loads: if it is an auxiliary loss, the tokens over which its last input is summed; the
            gradient of its output is 1.
        split: its backward in two parts; None if it has no trained parameter, or runs as one.
        begins: the exchange of its inputs before forward, whose adjoint follows backward.
        ends: the exchange of its outputs after forward, whose adjoint precedes backward.
    """

    omitted_defaults: ClassVar[frozenset[str]] = frozenset(
        {"joins_experts", "adds_experts", "side", "reruns"}
    )

    inputs: tuple[str, ...]
    outputs: tuple[Value, ...]
    parameters: tuple[str, ...] = ()
    saved_bytes: int = 0
    saves_input: bool = True
    forward_workspace_bytes: int = 0
    backward_workspace_bytes: int = 0
    reduces_output: bool = False
    reduces_input_gradient: bool = False
    gathers_input: bool = False
    leaves_whole: bool = False
    casts_tokens: bool = False
    gathers_context: bool = False
    context_offset: int | None = None
    swaps_output: bool = False
    joins_experts: bool = False
    adds_experts: bool = False
    side: bool = False
    reruns: bool = False
    adds: bool = False
    draws: Draws | None = None
    forward: tuple[Kernel, ...] = ()
    backward: tuple[Kernel, ...] = ()
    again: tuple[Kernel, ...] = ()
    runs_again: bool = True
    sums_again: bool = True
    forward_course: tuple[AllocationEvent, ...] = ()
    backward_course: tuple[AllocationEvent, ...] = ()
    split: SplitBackward | None = None
    experts: int | None = None
    drops: Drops | None = None
    routes: str = ""
    loads: LoadScope | None = None
    begins: SegmentExchange | None = field(init=False, repr=False, compare=False)
    ends: SegmentExchange | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        begins, ends = exchanges_of(
            (
                self.reduces_output,
                self.reduces_input_gradient,
                self.gathers_input,
                self.leaves_whole,
                self.casts_tokens,
                self.gathers_context,
                self.context_offset,
                self.swaps_output,
                self.joins_experts,
                self.adds_experts,
            )
        )
        object.__setattr__(self, "begins", begins)
        object.__setattr__(self, "ends", ends)

        if self.routes and self.routes not in {value.name for value in self.outputs}:
            raise ModelError(f"segment: routes {self.routes} is no output")

    @property
    def reads_gathered(self) -> bool:
        """Return True if it gathers inputs that are sharded over the tensor axis."""
        return self.begins is not None and self.begins.axis is ExchangeAxis.TENSOR

    def exchange_of(self, value: str) -> SegmentExchange | None:
        """Return the exchange of an input before forward: of each, or of the last if of keys."""
        if self.begins is None or self.begins.axis is not ExchangeAxis.CONTEXT:
            return self.begins
        return self.begins if value == self.inputs[-1] else None

    @property
    def sums(self) -> bool:
        """Return True if its outputs are partial sums over the tensor axis."""
        return self.ends is not None and self.ends.over(ExchangeAxis.TENSOR, ExchangeKind.SUM)

    @property
    def reads_all(self) -> bool:
        """Return True if it gathers its inputs from all expert ranks."""
        return self.begins is not None and self.begins.axis is ExchangeAxis.EXPERT

    @property
    def adds_all(self) -> bool:
        """Return True if its outputs are partial sums over expert ranks."""
        return self.ends is not None and self.ends.over(ExchangeAxis.EXPERT, ExchangeKind.SUM)

    @property
    def swaps(self) -> bool:
        """Return True if expert ranks exchange its outputs."""
        return self.ends is not None and self.ends.kind is ExchangeKind.SWAP

    def exchanges_rows(self, value: Value) -> bool:
        """Return True if expert ranks exchange `value`, an output: only copies of tokens are."""
        return self.swaps and value.copies > 0

    @property
    def counts(self) -> Value | None:
        """Return the output that `routes` names, if any."""
        return next((each for each in self.outputs if each.name == self.routes), None)

    @property
    def sums_gradients(self) -> bool:
        """Return True if its input gradients are partial sums over the tensor axis."""
        return sums_gradients(self.begins)

    @property
    def is_narrow(self) -> bool:
        """Return True if tokens that it gathers are cast to 8-bit floats."""
        return is_narrow(self.begins, self.ends)

    @property
    def leaves_gathered(self) -> bool:
        """Return True if the next segment reads the inputs that it gathered."""
        return self.begins is not None and self.begins.stays

    @property
    def kept_inputs(self) -> tuple[str, ...]:
        """Return the inputs that backward reads again."""
        return self.inputs[self.adds :] if self.saves_input else ()

    @property
    def shared_input(self) -> str | None:
        """Return the input that is gathered from ranks that share a sequence, if any."""
        exchange = self.begins
        gathers = exchange and exchange.over(ExchangeAxis.CONTEXT, ExchangeKind.GATHER)
        return self.inputs[-1] if gathers else None

    @property
    def passed_input(self) -> str | None:
        """Return the input received from another rank that shares the sequence, if any."""
        return self.inputs[-1] if self.offset else None

    @property
    def offset(self) -> int | None:
        """Return the distance to the rank whose value it reads, 0 for the own; None without one."""
        exchange = self.begins
        passes = exchange and exchange.over(ExchangeAxis.CONTEXT, ExchangeKind.PASS)
        return exchange.offset if exchange and passes else None

    def sums_output(self, *, again: bool) -> bool:
        """Return True if outputs are exchanged after forward, or when recomputed (`again`)."""
        return self.ends is not None and (self.sums_again or not again)

    def forward_kernels(self, *, again: bool) -> tuple[Kernel, ...]:
        """Return the kernels of forward, or of a recomputation (`again`)."""
        return self.again if again and self.again else self.forward


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A unit that is gathered and freed together: a block, the embedding, the head.

    If `checkpoint`, full checkpointing recomputes it. The next unit reads the last output of its
    last segment. A parameter that several units name is one tensor (tied embedding).

    A unit with a `module` is another call of that earlier unit in the same forward. It shares the
    unit's parameters and segments, and has separate values and saved tensors.

    Consecutive units that name the same `block` are checkpointed as one: only the input of the
    block is kept, and all of them are recomputed before the backward of the last.

    `biases` are biases of experts that its segments read; every rank holds them whole, in fp32.
    """

    name: str
    parameters: tuple[Parameter, ...]
    segments: tuple[Segment, ...]
    biases: tuple[Parameter, ...] = ()
    checkpoint: bool = True
    module: str = ""
    block: str = ""


BATCH = "batch"
"""The value that holds a micro-batch of data."""


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
class Model:
    """Units in the order of forward; the last output of the last one is the loss (one element).

    Attributes:
        batch: the value that holds one micro-batch on one data-parallel replica.
        micro_batch_size: sequences per micro-batch and data-parallel replica.
        tokens: tokens per micro-batch and data-parallel replica.
        tensor: ranks of the tensor axis that it was resolved for.
        expert, expert_tensor: ranks that hold different experts, and parts of the same experts.
        given: values that none of its units computes, received from the previous pipeline
            stage.
        forward_flops, backward_flops: per micro-batch and replica, over all ranks of the tensor
            axis, without recomputation (model FLOPs), with attention of all pairs of tokens.
            Backward omits unused gradients, such as those of frozen parameters.
        attention_flops: the part of both for products with scores.
        masked_flops: the part of these that causal masking skips: half, or less with a window.
        architecture: the shape it was built from, if any; a backend can build modules of it.
        tiles: tiles into which linear layers of its blocks are cut, each a unit.
        routing: copies of tokens that expert ranks exchange; None if they exchange none.
        parameters: every parameter once, in the order of first use.
        loads: for each bias of experts, the value from whose sum it is updated.
    """

    omitted_defaults: ClassVar[frozenset[str]] = frozenset({"expert", "expert_tensor"})

    name: str
    units: tuple[Unit, ...]
    batch: Value
    micro_batch_size: int = 1
    tokens: int = 1
    tensor: int = 1
    expert: int = 1
    expert_tensor: int = 1
    given: tuple[Value, ...] = ()
    forward_flops: int = 0
    backward_flops: int = 0
    attention_flops: int = 0
    masked_flops: int = 0
    architecture: Architecture | None = None
    tiles: int = 1
    routing: Routing | None = None
    values: dict[str, Value] = field(init=False, repr=False, compare=False)
    loads: dict[str, str] = field(init=False, repr=False, compare=False)
    frozen: frozenset[str] = field(init=False, repr=False, compare=False)
    parameters: tuple[Parameter, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.units:
            raise ModelError("units: a model needs at least one")
        names = [unit.name for unit in self.units]
        if len(set(names)) != len(names):
            raise ModelError("units: two have one name")
        values = {value.name: value for value in (self.batch, *self.given)}
        for unit in self.units:
            known = {each.name for each in (*unit.parameters, *unit.biases)}
            for segment in unit.segments:
                if missing := [name for name in segment.inputs if name not in values]:
                    raise ModelError(f"unit {unit.name}: reads {missing[0]} before it is made")
                if missing := [name for name in segment.parameters if name not in known]:
                    raise ModelError(f"unit {unit.name}: has no parameter {missing[0]}")
                for value in segment.outputs:
                    if value.name in values:
                        raise ModelError(f"unit {unit.name}: makes {value.name} a second time")
                    values[value.name] = value
        _need_known_calls(self.units)
        shapes = _by_name(each for unit in self.units for each in unit.parameters)
        every = shapes | _by_name(each for unit in self.units for each in unit.biases)
        frozen = frozenset(name for name, each in every.items() if each.frozen)
        loads = {name: each.load for name, each in every.items() if each.load}
        if unmade := [name for name, load in loads.items() if load not in values]:
            raise ModelError(f"parameter {unmade[0]}: load {loads[unmade[0]]} is no value")
        object.__setattr__(self, "values", values)
        object.__setattr__(self, "loads", loads)
        object.__setattr__(self, "frozen", frozen)
        object.__setattr__(self, "parameters", tuple(shapes.values()))
        for unit in self.units:
            for segment in unit.segments:
                if segment.saved_bytes and not self.runs_backward(segment):
                    raise ModelError(
                        f"unit {unit.name}: saves {segment.saved_bytes} bytes for a backward that "
                        "it does not have"
                    )

    @property
    def summed_copies(self) -> frozenset[str]:
        """Names of parameters that tensor ranks hold copies of, with gradients to be summed.

        With sequence parallelism each rank's gradient of any copy covers its own tokens alone.
        """
        by_tokens = any(value.tensor_sharded for value in self.values.values())
        return frozenset(
            each.name
            for each in self.parameters
            if not (each.tensor_sharded or each.expert) and (by_tokens or each.serves_own_heads)
        )

    @property
    def biases(self) -> tuple[Parameter, ...]:
        """Biases of experts that units hold apart from their parameters."""
        return tuple(each for unit in self.units for each in unit.biases)

    @property
    def with_biases(self) -> "Model":
        """This model with biases of experts among the parameters of units."""
        if not any(unit.biases for unit in self.units):
            return self
        units = (
            replace(unit, parameters=(*unit.parameters, *unit.biases), biases=())
            for unit in self.units
        )
        return replace(self, units=tuple(units))

    @property
    def modules(self) -> tuple[Unit, ...]:
        """Every unit once, without repeated calls."""
        return tuple(unit for unit in self.units if not unit.module)

    @property
    def checkpointed_together(self) -> tuple[tuple[Unit, ...], ...]:
        """Every unit, in groups that are recomputed together."""
        if not any(unit.block for unit in self.units):
            return tuple((unit,) for unit in self.units)
        grouped = groupby(self.units, key=lambda unit: (unit.block, unit.block or unit.name))
        return tuple(tuple(units) for _, units in grouped)

    @property
    def parameter_count(self) -> int:
        """Elements of all parameters, over all ranks that hold parts of them, each counted once."""
        return self.count_of(self.parameters)

    @property
    def trained_count(self) -> int:
        """Elements of the trained parameters, counted in the same manner."""
        return self.count_of(each for each in self.parameters if not each.frozen)

    @property
    def active_count(self) -> int:
        """Elements of the parameters that a token runs through, counted in the same manner.

        A token runs through `top_k` routed experts. All other parameters count whole, including the
        token embedding, although the token reads only one row.
        """
        shape = self.architecture
        if shape is None or shape.experts is None:
            return self.parameter_count
        routed = self.count_of(each for each in self.parameters if each.experts)
        idle = shape.experts.count - shape.experts.top_k
        return self.parameter_count - routed * idle // shape.experts.count

    def count_of(self, parameters: Iterable[Parameter]) -> int:
        """Return the elements of `parameters` over all ranks that hold parts of them."""
        return sum(each.elements * self._parts(each) for each in parameters)

    def _parts(self, parameter: Parameter) -> int:
        """Return the number of ranks that hold different parts of a parameter."""
        if parameter.expert:
            return self.expert * self.expert_tensor
        return self.tensor if parameter.tensor_sharded else 1

    def trained_of(self, segment: Segment) -> tuple[str, ...]:
        """Return the parameters of a segment with gradients, in its order."""
        return tuple(name for name in segment.parameters if name not in self.frozen)

    def runs_backward(self, segment: Segment) -> bool:
        """Return True if a segment has a backward: it trains parameters or passes a gradient on."""
        for value in segment.outputs:
            if value.requires_gradient:
                return True
        return not self.frozen.issuperset(segment.parameters)

    @property
    def loss(self) -> Value:
        """The value that training minimises."""
        return self.units[-1].segments[-1].outputs[-1]


def _by_name(parameters: Iterable[Parameter]) -> dict[str, Parameter]:
    """Return parameters of units by name.

    Raises:
        ModelError: two of one name differ.
    """
    found: dict[str, Parameter] = {}
    for each in parameters:
        if found.setdefault(each.name, each) != each:
            raise ModelError(f"parameter {each.name}: differs between units")
    return found


def _need_known_calls(units: tuple[Unit, ...]) -> None:
    """Raise ModelError unless repeated calls of a unit have its parameters and segments.

    Raises:
        ModelError: a unit calls no earlier unit, or differs from it.
    """
    first: dict[str, Unit] = {}
    for unit in units:
        called = first.setdefault(unit.module or unit.name, unit)
        if called is unit and not unit.module:
            continue
        if called is unit:
            raise ModelError(f"unit {unit.name}: calls {unit.module}, which no earlier unit is")
        read, known = (
            (each.parameters, each.checkpoint, [part.parameters for part in each.segments])
            for each in (unit, called)
        )
        if read != known:
            raise ModelError(f"unit {unit.name}: differs from {unit.module}, which it calls again")
