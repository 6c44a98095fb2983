"""One unit forward and backward, with memory that the schedule owns.

The schedule drives autograd. A unit runs on detached inputs, and its backward is a call of
`torch.autograd.grad` of its own. Parameters and inputs enter through a function of autograd, and
what is kept are gradient edges, never a leaf or an output: a leaf's node would hold its tensor, and
with it the storage of the gathered bucket.

What autograd wants to save of a parameter becomes a handle: which parameter, and which part of it.
At backward the handle is bound to the buffer that holds the parameter then. So the buffer gathered
for forward can be freed, and the one gathered for backward is another. The same goes for an input
that the schedule gathers for each pass; one that it gathers for forward alone is copied. Where
parameters stay in their memory, that is done in a unit's first visit alone, to look at it.
"""

import weakref
from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final, NamedTuple, Never

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge, saved_tensors_hooks
from torch.utils.checkpoint import CheckpointFunction

from zsim_torch.module.absent import AbsentParameterError, LeftMemory
from zsim_torch.module.entered import ENTERED, edges_of, enter
from zsim_torch.module.unit import TorchUnit

RECOMPUTE_INSTEAD: Final = "let the schedule recompute (checkpointing full)"


class UnitRunError(RuntimeError):
    """A unit does what its schedule cannot follow; the message names the unit."""


_FORWARD: Final = "forward"


class _Handle(NamedTuple):
    """Part of a parameter, or of an input behind them: which, and elements from its start."""

    number: int
    offset: int
    size: torch.Size
    stride: tuple[int, ...]


class InputEntry(Enum):
    """Ways to keep for backward an input whose memory may be another one's by then."""

    BOUND = auto()
    """Backward is given it again, from other memory perhaps."""
    COPIED = auto()
    """Backward is not given it again, so what it reads is copied."""


class _Kept(NamedTuple):
    """A tensor that autograd keeps, and its version when it was kept."""

    tensor: torch.Tensor
    version: int


_CHANGED: Final = "modified by an inplace operation"
"""Words of autograd's own error about a tensor that it has saved."""


def _changed(unit: str) -> str:
    return f"unit {unit}: a tensor that its backward needs was changed in place"


def version(tensor: torch.Tensor) -> int:
    """Return how often the memory of `tensor` was changed in place."""
    return tensor._version  # pyright: ignore[reportPrivateUsage]  # torch has no public name


class _Saving:
    """Packs what autograd saves while a unit runs, and unpacks it at backward.

    It holds no tensor after forward; `views` are bound for the time of the backward.
    """

    def __init__(self, unit: TorchUnit, views: Sequence[torch.Tensor]) -> None:
        self.unit = unit.name
        self.device = views[0].device.type if views else "cpu"
        self.views: Sequence[torch.Tensor] | None = None
        self.windows: dict[int, list[tuple[int, int, int]]] = {}
        self.binds_inputs = False
        self._count = len(views)
        self._copied: dict[int, torch.Tensor] = {}
        self._copies: dict[int, torch.Tensor] = {}
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        for index, view in enumerate(views):
            if view.numel():
                storage = self._bind(view, index)
                self._storages[storage.data_ptr()] = weakref.ref(storage)

    def _bind(self, view: torch.Tensor, index: int) -> torch.UntypedStorage:
        start = int(view.storage_offset())
        storage = view.untyped_storage()
        window = (start, start + view.numel(), index)
        self.windows.setdefault(storage.data_ptr(), []).append(window)
        return storage

    def enter_input(self, position: int, value: torch.Tensor, entry: InputEntry) -> None:
        """Bind the input at `position` to another view later, or copy what is kept of it."""
        if value.numel() and entry is InputEntry.BOUND:
            self.binds_inputs = True
            self._bind(value, self._count + position)
        elif value.numel():
            self._copied[value.untyped_storage().data_ptr()] = value

    def end_forward(self) -> None:
        """Forget what was copied: other memory may be where it was."""
        self._copied.clear()
        self._copies.clear()

    def _kept_copy(self, tensor: torch.Tensor) -> _Kept | None:
        """Return `tensor` in a copy of the input that it is part of, made once; None if of none."""
        pointer = tensor.untyped_storage().data_ptr()
        value = self._copied.get(pointer)
        if value is None:
            return None
        if pointer not in self._copies:
            self._copies[pointer] = value.detach().clone()
        offset = tensor.storage_offset() - value.storage_offset()
        part = self._copies[pointer].as_strided(tensor.shape, tensor.stride(), offset)
        return _Kept(part, version(part))

    def pack(self, tensor: torch.Tensor) -> _Handle | _Kept:
        """Return a handle for a part of a parameter, anything else as it is."""
        if torch.is_autocast_enabled(self.device):
            raise UnitRunError(
                f"unit {self.unit}: autocast inside the unit keeps cast copies of its parameters; "
                "choose a precision in the strategy instead"
            )
        # All storages without elements have one data pointer, 0.
        if tensor.numel():
            start = int(tensor.storage_offset())
            for low, high, index in self.windows.get(tensor.untyped_storage().data_ptr(), ()):
                if low <= start < high:
                    return _Handle(index, start - low, tensor.shape, tensor.stride())
            if self._copied and (kept := self._kept_copy(tensor)) is not None:
                return kept
        return _Kept(tensor.detach(), version(tensor))

    def unpack(self, packed: _Handle | _Kept) -> torch.Tensor:
        """Return the part of the parameter where it is now, or the tensor that was kept."""
        if isinstance(packed, _Kept):
            if version(packed.tensor) != packed.version:
                raise UnitRunError(_changed(self.unit))
            return packed.tensor
        if self.views is None:
            raise UnitRunError(f"unit {self.unit}: its backward reads parameters outside its turn")
        view = self.views[packed.number]
        offset = view.storage_offset() + packed.offset
        return view.as_strided(packed.size, packed.stride, offset)

    def watch(self, views: Sequence[torch.Tensor]) -> AbstractContextManager[object]:
        """Refuse reads of memory that held the parameters in forward, while they are in `views`.

        Such memory lives on where somebody kept it or the schedule has not freed it yet. Both are
        rare: most backwards run without the mode, which makes calls of torch in Python slower.
        """
        there = {pointer for pointer, storage in self._storages.items() if storage() is not None}
        there -= {view.untyped_storage().data_ptr() for view in views}
        return LeftMemory(there) if there else nullcontext()


class _Output(NamedTuple):
    """An output: where its gradient enters, and what that has to look like."""

    edge: GradientEdge | None
    shape: torch.Size
    dtype: torch.dtype


@dataclass(slots=True)
class Record:
    """The record that a forward leaves for its backward: edges of the graph, no tensor of ours."""

    unit: TorchUnit
    outputs: list[_Output] = field(default_factory=list[_Output])
    parameters: list[GradientEdge | None] = field(default_factory=list[GradientEdge | None])
    inputs: list[GradientEdge] = field(default_factory=list[GradientEdge])
    saving: _Saving | None = None

    @property
    def binds_inputs(self) -> bool:
        """Return whether backward has to be given the inputs again."""
        return self.saving is not None and self.saving.binds_inputs


def _outputs(unit: TorchUnit, result: object) -> tuple[torch.Tensor, ...]:
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
        UnitRunError: it returns something that is no tensor.
    """
    return _outputs(unit, unit.run(parameters, inputs))


@contextmanager
def _forward_of(unit: TorchUnit) -> Generator[None]:
    """Refuse inside what a forward of `unit` must not do.

    It must not read parameters that the schedule does not give it, and not run a checkpoint of
    torch that calls a backward inside the backward of the unit. Autograd refuses the latter too,
    but not where no input of the checkpoint has a gradient: its parameters would have none either.

    Raises:
        UnitRunError: it does.
    """

    def refuse(*_: object) -> Never:
        raise UnitRunError(
            f"unit {unit.name}: torch.utils.checkpoint runs part of it again at backward; "
            f"{RECOMPUTE_INSTEAD}"
        )

    own = vars(CheckpointFunction)[_FORWARD]
    setattr(CheckpointFunction, _FORWARD, refuse)
    try:
        yield
    except AbsentParameterError as error:
        raise UnitRunError(
            f"unit {unit.name}: its forward reads {error.what}, which is not given to it: "
            "another unit's, or one that a function kept?"
        ) from error
    finally:
        setattr(CheckpointFunction, _FORWARD, own)


@contextmanager
def _backward_of(record: "Record", views: Sequence[torch.Tensor]) -> Generator[None]:
    """Bind the parameters of a unit to `views`, and refuse all other reads of them.

    Raises:
        UnitRunError: there is one, or something that was saved was changed in place.
    """
    assert record.saving is not None
    record.saving.views = views
    try:
        with record.saving.watch(views):
            yield
    except AbsentParameterError as error:
        raise UnitRunError(
            f"unit {record.unit.name}: its backward reads {error.what}, which is elsewhere by then "
            f"(torch.utils.checkpoint? a hook?); {RECOMPUTE_INSTEAD}, save tensors with "
            "ctx.save_for_backward"
        ) from error
    except RuntimeError as error:
        if _CHANGED not in str(error):
            raise
        raise UnitRunError(_changed(record.unit.name)) from error
    finally:
        record.saving.views = None


def evaluate(
    unit: TorchUnit, views: Sequence[torch.Tensor], inputs: Sequence[object]
) -> list[torch.Tensor]:
    """Run `unit` without a graph and return its outputs."""
    with torch.enable_grad():
        entered = enter(views)  # so that one that is kept is known again
    with torch.no_grad(), _forward_of(unit):
        return [output.detach() for output in call(unit, entered, inputs)]


def forward(
    unit: TorchUnit,
    views: Sequence[torch.Tensor],
    inputs: Sequence[object],
    differentiated: Sequence[int],
    *,
    entries: Mapping[int, InputEntry] | None = None,
    steady: bool = False,
) -> tuple[list[torch.Tensor], Record]:
    """Run `unit` and return outputs without history, and what its backward needs.

    `views` are its parameters in its order; `differentiated` are the positions of the inputs whose
    gradients the backward will give. Inputs are kept for it as they are, but for those `entries`.
    Where parameters are `steady`, their memory is theirs until backward, and autograd keeps them
    itself: what it saves is looked at one by one else, which takes as long as a small layer.
    """
    steady = steady and not entries
    record = Record(unit)
    with torch.enable_grad():
        given = list(inputs)
        record.saving = _Saving(unit, () if steady else views)
        for position, entry in (entries or {}).items():
            value = given[position]
            assert isinstance(value, torch.Tensor)
            record.saving.enter_input(position, value, entry)
        read: list[torch.Tensor] = []
        for position in differentiated:
            value = given[position]
            if not isinstance(value, torch.Tensor):
                raise UnitRunError(f"unit {unit.name}: its input {position} is no tensor")
            read.append(value)
        trained = unit.trained(range(len(unit.names)))
        entered = enter([*(views[place] for place in trained), *read])
        own = edges_of(entered)
        parameters = [view.detach() for view in views] if unit.frozen else list(views)
        record.parameters = [None] * len(views)
        for place, parameter in zip(trained, entered, strict=False):
            parameters[place] = parameter
        for place, own_edge in zip(trained, own, strict=False):
            record.parameters[place] = own_edge
        for position, value in zip(differentiated, entered[len(trained) :], strict=True):
            given[position] = value
        record.inputs = own[len(trained) :]
        del entered, read
        saving = record.saving
        hooks = nullcontext() if steady else saved_tensors_hooks(saving.pack, saving.unpack)
        with _forward_of(unit), hooks:
            outputs = call(unit, parameters, given)
    record.saving.end_forward()
    for output in outputs:
        edge = get_gradient_edge(output) if output.requires_grad else None
        record.outputs.append(_Output(edge, output.shape, output.dtype))
    _need_own_inputs(record)
    return [output.detach() for output in outputs], record


def _need_own_inputs(record: Record) -> None:
    """Return if the outputs depend on what entered this forward alone.

    Raises:
        UnitRunError: they depend on what entered another one, whose gradient would be lost.
    """
    own = {edge.node for edge in (*record.parameters, *record.inputs) if edge is not None}
    seen: set[Node] = set()
    waiting = [output.edge.node for output in record.outputs if output.edge is not None]
    while waiting:
        node = waiting.pop()
        if node in seen or node in own:
            continue
        if type(node).__name__ == ENTERED:
            raise UnitRunError(
                f"unit {record.unit.name}: its forward reads what another forward was given or "
                "made, past its inputs (a module or function that kept it?): the gradient is lost"
            )
        seen.add(node)
        waiting += [before for before, _ in node.next_functions if before is not None]


def backward(
    record: Record, views: Sequence[torch.Tensor], output_gradients: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor | None], list[torch.Tensor | None]]:
    """Gradients of the parameters, in the unit's order, and of the differentiated inputs.

    None stands for a zero gradient of something that the outputs do not depend on, and for that of
    a frozen parameter. `views` hold the parameters now, and behind them the inputs where those are
    bound again.
    """
    edges: list[GradientEdge] = []
    seeds: list[torch.Tensor] = []
    for output, gradient in zip(record.outputs, output_gradients, strict=False):
        if output.edge is not None:
            edges.append(output.edge)
            seeds.append(gradient.reshape(output.shape).to(output.dtype))
    trained = [edge for edge in record.parameters if edge is not None]
    wanted = [*trained, *record.inputs]
    if not edges or not wanted:
        return [None] * len(record.parameters), [None] * len(record.inputs)
    with _backward_of(record, views):
        found = iter(torch.autograd.grad(edges, wanted, seeds, allow_unused=True))
    of_parameters = [None if edge is None else next(found) for edge in record.parameters]
    return of_parameters, list(found)
