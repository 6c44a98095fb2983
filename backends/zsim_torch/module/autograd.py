"""Run one unit forward and backward, with memory that the schedule owns.

The schedule drives autograd. A unit runs on detached inputs, and its backward is a separate call of
`torch.autograd.grad`. Parameters and inputs enter through an autograd function. Only gradient edges
are kept, never a leaf or an output: a leaf's node would hold its tensor, and with it the storage of
the gathered bucket.

If autograd saves a parameter, a handle is stored instead: the parameter's number and the part of
it. At backward, the handle is bound to the buffer that holds the parameter at that time. So the
buffer gathered for forward can be freed, and backward uses another one. The same holds for an input
that the schedule gathers for each pass; an input that it gathers for forward only is copied. If
parameters stay in memory, this is done only in a unit's first visit, to check it.
"""

from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final, NamedTuple

import torch
from torch._C import _ImperativeEngine  # pyright: ignore[reportPrivateUsage]
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import (
    GradientEdge,
    Node,
    _engine_run_backward,  # pyright: ignore[reportPrivateUsage]  # torch.autograd.grad calls it
    get_gradient_edge,
    saved_tensors_hooks,
)

from zsim_torch.module.compiled import kept_from_compiler
from zsim_torch.module.entered import ENTRIES, Leaves, edges_of, enter, is_entered
from zsim_torch.module.saving import InputEntry, Saving
from zsim_torch.module.unit import TorchUnit, UnitRunError
from zsim_torch.module.unit_refusal import BackwardRefusals, ForwardRefusals

LINKS: Final = 8
"""Maximum number of units in one connected autograd graph."""

_GRAD: Final = torch.autograd.grad
_ENGINE: Final = _ImperativeEngine()  # it has no state: all instances use torch's engine


class BackwardPart(Enum):
    """Parts of a backward: gradients of inputs, those of parameters, or both at once."""

    WHOLE = auto()
    INPUTS = auto()
    WEIGHTS = auto()


class _Output(NamedTuple):
    """An output: the edge where its gradient enters, and the gradient's shape and data type."""

    edge: GradientEdge | None
    shape: torch.Size
    dtype: torch.dtype

    @property
    def has_gradient(self) -> bool:
        """Return False for an output of integers, for which the schedule has no gradient."""
        return self.dtype.is_floating_point or self.dtype.is_complex


class UnitLink(NamedTuple):
    """The only output of a unit, with its history, and the length of its chain of linked units.

    The next unit uses it without a new entry: its gradient is taken at `edge`. Each backward
    traverses the whole connected graph, so the chain is cut after `LINKS` units.
    """

    output: torch.Tensor
    edge: GradientEdge
    length: int

    @property
    def holds(self) -> bool:
        """Return True if the output was not changed in place since."""
        return self.output.grad_fn is self.edge.node

    @classmethod
    def of(
        cls, record: "Record", outputs: Sequence[torch.Tensor], before: int
    ) -> "UnitLink | None":
        """Return the link for the outputs of a forward, after `before` earlier links; or None.

        An output with hooks cannot be linked: they would run twice, when its gradient is taken and
        when the unit's backward starts from it.
        """
        if len(outputs) != 1 or before >= LINKS or record.saving is not None:
            return None
        (output,), edge = outputs, record.outputs[0].edge
        if edge is None or output.grad_fn is not edge.node or output._backward_hooks:
            return None
        return cls(output, edge, before + 1)


@dataclass(slots=True)
class Record:
    """Record of a forward for its backward: edges of the graph, but no tensors of the schedule."""

    unit: TorchUnit
    outputs: list[_Output] = field(default_factory=list[_Output])
    parameters: list[GradientEdge | None] = field(default_factory=list[GradientEdge | None])
    inputs: list[GradientEdge] = field(default_factory=list[GradientEdge])
    saving: Saving | None = None
    incoming: list[torch.Tensor] | None = None
    """Gradients of the outputs, after the first part of a two-part backward."""
    link: GradientEdge | None = None
    """The linked output of another unit that is the input; None if the input entered."""

    @property
    def reads_parameters(self) -> bool:
        """Return True if backward needs the parameters again."""
        return self.saving is not None

    @property
    def binds_inputs(self) -> bool:
        """Return True if backward needs the inputs again."""
        return self.saving is not None and self.saving.binds_inputs


def _outputs(unit: TorchUnit, result: object) -> tuple[torch.Tensor, ...]:
    if isinstance(result, torch.Tensor):
        return (result,)
    made = result if isinstance(result, tuple) else (result,)
    tensors = tuple(value for value in made if isinstance(value, torch.Tensor))
    if len(tensors) != len(made):
        raise UnitRunError(f"unit {unit.name}: it must return a tensor or a tuple of tensors")
    return tensors


def call(
    unit: TorchUnit, parameters: Sequence[torch.Tensor], inputs: Sequence[object]
) -> tuple[torch.Tensor, ...]:
    """Call the module of `unit` with `parameters` in place of its own.

    Raises:
        UnitRunError: it returns something other than tensors.
    """
    return _outputs(unit, unit.run(parameters, inputs))


@contextmanager
def _backward_of(record: "Record", views: Sequence[torch.Tensor]) -> Generator[None]:
    """Bind the parameters of a unit to `views`, and refuse all other reads of them.

    Raises:
        UnitRunError: another read happens, or a saved tensor was changed in place.
    """
    saving = record.saving
    assert saving is not None
    saving.views = views
    try:
        with BackwardRefusals(record.unit), saving.watch(views):
            yield
    finally:
        saving.views = None


def evaluate(
    unit: TorchUnit, views: Sequence[torch.Tensor], inputs: Sequence[object]
) -> list[torch.Tensor]:
    """Run `unit` without a graph and return its outputs."""
    with torch.enable_grad():
        entered = enter(views)  # marked, so that a tensor kept by the module is recognized later
    with torch.no_grad(), ForwardRefusals(unit):
        return [output.detach() for output in call(unit, entered, inputs)]


def forward(
    unit: TorchUnit,
    views: Sequence[torch.Tensor],
    inputs: Sequence[object],
    differentiated: Sequence[int],
    *,
    entries: Mapping[int, InputEntry] | None = None,
    leaves: Leaves | None = None,
    link: UnitLink | None = None,
) -> tuple[tuple[torch.Tensor, ...], Record]:
    """Run `unit`; return its outputs with their history, and the record for its backward.

    `views` are its parameters in its order; `differentiated` are the positions of the inputs whose
    gradients the backward will return. Inputs are saved as they are, except `entries`. With
    `leaves` instead of `views`, parameters stay in memory until backward and autograd keeps them
    itself: checking every saved tensor takes as long as a small layer. With a `link`, too, the only
    input with a gradient is that output of another unit.
    """
    record = Record(unit)
    with nullcontext() if torch.is_grad_enabled() else torch.enable_grad():
        given = list(inputs)
        if leaves is not None and link is not None:
            parameters, record.parameters = leaves.tensors, leaves.edges
            record.link, record.inputs = link.edge, [link.edge]
            (place,) = differentiated
            given[place] = link.output
        else:
            read = _tensors_at(unit, given, differentiated)
            if leaves is None:
                kept = {place: (entry, given[place]) for place, entry in (entries or {}).items()}
                parameters, entered = _enter_all(record, views, read, kept)
            else:
                parameters, record.parameters = leaves.tensors, leaves.edges
                entered = enter(read)
                record.inputs = edges_of(entered)
            for position, own in zip(differentiated, entered, strict=True):
                given[position] = own
            del entered, read
        saving = record.saving
        if saving is None:
            with ForwardRefusals(unit):
                outputs = call(unit, parameters, given)
        else:
            with ForwardRefusals(unit), _hooks(unit, saving):
                outputs = call(unit, parameters, given)
            saving.end_forward()
    if link is not None and link.output._backward_hooks:
        raise UnitRunError(
            f"unit {unit.name}: its forward puts a hook on what it is called with; put it on what "
            "a unit makes"
        )
    record.outputs = [_Output(_edge_of(each), each.shape, each.dtype) for each in outputs]
    _need_own_inputs(record)
    return outputs, record


def _tensors_at(
    unit: TorchUnit, inputs: Sequence[object], places: Sequence[int]
) -> list[torch.Tensor]:
    """Return the inputs at `places`, which have gradients.

    Raises:
        UnitRunError: one is not a tensor.
    """
    found: list[torch.Tensor] = []
    for place in places:
        value = inputs[place]
        if not isinstance(value, torch.Tensor):
            raise UnitRunError(f"unit {unit.name}: its input {place} is no tensor")
        found.append(value)
    return found


def _hooks(unit: TorchUnit, saving: Saving) -> AbstractContextManager[object]:
    pack, unpack = saving.pack, saving.unpack
    if unit.is_compiled:
        pack, unpack = kept_from_compiler(pack), kept_from_compiler(unpack)
    return saved_tensors_hooks(pack, unpack)


def _edge_of(output: torch.Tensor) -> GradientEdge | None:
    """Return the edge at which the gradient of an output enters, if it has one."""
    node = output.grad_fn
    if node is None or isinstance(node, BackwardCFunction):
        return get_gradient_edge(output) if output.requires_grad else None
    return GradientEdge(node, output.output_nr, None)


def _enter_all(
    record: Record,
    views: Sequence[torch.Tensor],
    read: Sequence[torch.Tensor],
    entries: Mapping[int, tuple[InputEntry, object]],
) -> tuple[list[torch.Tensor], tuple[torch.Tensor, ...]]:
    """Enter parameters and the inputs `read`; saved tensors go through `record.saving`."""
    unit = record.unit
    saving = record.saving = Saving(unit, views)
    for position, (entry, value) in entries.items():
        assert isinstance(value, torch.Tensor)
        saving.enter_input(position, value, entry)
    trained = unit.trained(range(len(unit.names)))
    entered = enter([*(views[place] for place in trained), *read])
    own = edges_of(entered)
    parameters = [view.detach() for view in views] if unit.frozen else list(views)
    record.parameters = [None] * len(views)
    for place, parameter, edge in zip(trained, entered, own, strict=False):
        parameters[place], record.parameters[place] = parameter, edge
    record.inputs = own[len(trained) :]
    return parameters, entered[len(trained) :]


def _need_own_inputs(record: Record) -> None:
    """Raise UnitRunError unless the outputs depend only on inputs of this forward.

    The gradient of anything that entered another forward would be lost.
    """
    seen: set[Node] = {edge.node for edge in record.parameters if edge is not None}
    seen.update(edge.node for edge in record.inputs)
    link = record.link
    maker, place = (None, 0) if link is None else (link.node, link.output_nr)
    waiting: list[Node] = [each.edge.node for each in record.outputs if each.edge]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        is_others = type(node).__name__ in ENTRIES and is_entered(node)
        for each, number in node.next_functions:
            if each is None:
                continue
            if each not in seen:
                waiting.append(each)
            elif each is maker and number != place:
                is_others = True
        if is_others:
            raise UnitRunError(
                f"unit {record.unit.name}: its forward reads what another forward was given or "
                "made, past its inputs (a module or function that kept it?): the gradient is lost"
            )


def backward(
    record: Record,
    views: Sequence[torch.Tensor],
    output_gradients: Sequence[torch.Tensor],
    part: BackwardPart = BackwardPart.WHOLE,
) -> tuple[Sequence[torch.Tensor | None], Sequence[torch.Tensor | None]]:
    """Return gradients of the parameters, in the unit's order, and of the differentiated inputs.

    None stands for a zero gradient, if the outputs do not depend on a value, and for frozen
    parameters. `views` hold the parameters now, followed by the inputs if these are bound again.

    With INPUTS, the graph is kept and no gradients of parameters are computed. WEIGHTS then
    computes them from the same gradients of the outputs, in a second pass through the graph.
    """
    edges: list[GradientEdge] = []
    seeds: list[torch.Tensor] = []
    outputs = [each for each in record.outputs if each.has_gradient]
    for (edge, shape, dtype), gradient in zip(outputs, output_gradients, strict=False):
        if edge is not None:
            edges.append(edge)
            fits = gradient.shape == shape and gradient.dtype == dtype
            seeds.append(gradient if fits else gradient.reshape(shape).to(dtype))
    first = part is BackwardPart.INPUTS
    trained = [edge for edge in record.parameters if edge is not None and not first]
    inputs = [] if part is BackwardPart.WEIGHTS else record.inputs
    wanted = [*trained, *inputs]
    if not edges or not wanted:
        return [None] * len(record.parameters), [None] * len(inputs)
    with (
        _backward_of(record, views) if record.saving is not None else BackwardRefusals(record.unit)
    ):
        found = _gradients(edges, wanted, seeds, keeps_graph=first)
    count = len(trained)
    if count == len(record.parameters):
        return found[:count], found[count:]
    of_trained = iter(found[:count])
    of_parameters = [
        None if edge is None or first else next(of_trained) for edge in record.parameters
    ]
    return of_parameters, found[count:]


def _gradients(
    edges: Sequence[GradientEdge],
    wanted: Sequence[GradientEdge],
    seeds: Sequence[torch.Tensor],
    *,
    keeps_graph: bool,
) -> tuple[torch.Tensor | None, ...]:
    """Return the result of `torch.autograd.grad` without checks: seeds have the right shapes."""
    if torch.autograd.grad is not _GRAD:  # an observer has replaced it
        return torch.autograd.grad(
            edges, wanted, seeds, retain_graph=keeps_graph, allow_unused=True
        )
    # On a CPU, no device thread needs the context that `_engine_run_backward` sets up.
    run = _ENGINE.run_backward if seeds[0].is_cpu else _engine_run_backward
    return run(
        tuple(edges),
        tuple(seeds),
        keeps_graph,
        False,  # noqa: FBT003  (create_graph)
        tuple(wanted),
        allow_unreachable=True,
        accumulate_grad=False,
    )
