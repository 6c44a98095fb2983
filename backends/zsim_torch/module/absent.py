"""Refuse reads of a module's parameters while a schedule holds them.

A unit runs on parameters that the schedule passes to it. Any other reader of the module's own
parameters (a forward that `torch.utils.checkpoint` reruns at backward, a hook, a function that kept
a parameter) would compute with wrong values, so it gets an error. For readers outside Python, the
parameter's memory contains NaN.
"""

from collections.abc import Callable, Container, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import new_class
from typing import Any, Final, cast

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

HELD: Final = "it is read while a schedule has it; read it after training"
LOST: Final = (
    "it has no value: its training failed, or ended with write_back=False; load a checkpoint with "
    "Option(initial=...) or load_state_dict(..., assign=True)"
)


class AbsentParameterError(RuntimeError):
    """A parameter was read while a schedule holds it, or after its value was lost.

    `what` names the parameter.
    """

    def __init__(self, what: str, why: str = HELD) -> None:
        super().__init__(f"{what}: {why}")
        self.what = what


_GETTERS = (
    "shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_meta", "is_cuda",
    "is_leaf", "retains_grad", "_backward_hooks", "_post_accumulate_grad_hooks",
)  # fmt: skip
READS_NOTHING: Final = frozenset(
    [
        *(getattr(torch.Tensor, name).__get__ for name in _GETTERS),
        torch.Tensor.size,
        torch.Tensor.dim,
        torch.Tensor.numel,
        torch.Tensor.is_floating_point,
        torch.Tensor.__repr__,
    ]
)
"""Functions that may be called with an absent parameter: they read no elements."""


class _Absent:
    """Base class that is put in front of a parameter's own class while it is absent."""

    parameter_name: str
    own_class: type[nn.Parameter]
    why: str

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: Iterable[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Call `func` if it reads no element; torch calls this for every function.

        Raises:
            AbsentParameterError: `func` may read an element.
        """
        if func not in READS_NOTHING:
            raise AbsentParameterError(f"parameter {cls.parameter_name}", cls.why)
        # Torch documents it only under this name (docs: "Extending PyTorch").
        with torch._C.DisableTorchFunctionSubclass():  # pyright: ignore[reportPrivateUsage]
            return func(*args, **(kwargs or {}))


class Absence:
    """Context manager that refuses reads of the parameters of `module`."""

    def __init__(self, module: nn.Module) -> None:
        self._classes = [
            (parameter, type(parameter), _absent(name, type(parameter)))
            for name, parameter in module.named_parameters()
        ]

    def __enter__(self) -> None:
        # Torch's lazy parameters change their class in the same way.
        for parameter, _, absent in self._classes:
            parameter.__class__ = absent

    def __exit__(self, *error: object) -> None:
        for parameter, own, _ in self._classes:
            parameter.__class__ = own


def _absent(name: str, own: type[nn.Parameter], why: str = HELD) -> type[nn.Parameter]:
    made = new_class(
        f"Absent{own.__name__}",
        (_Absent, own),
        exec_body=lambda body: body.update(parameter_name=name, own_class=own, why=why),
    )
    return cast("type[nn.Parameter]", made)


def is_absent(parameter: torch.Tensor) -> bool:
    """Return True if a schedule holds the parameter, or if its value was lost."""
    return isinstance(parameter, _Absent)


@contextmanager
def readable(module: nn.Module) -> Generator[None]:
    """Return a context in which lost parameters of `module` can be read, as NaN."""
    names = [name for name, each in module.named_parameters() if _found(each)]
    try:
        yield
    finally:
        _lose(module, names)


def _found(parameter: nn.Parameter) -> bool:
    """Restore the class of a lost parameter; return True if it was lost."""
    kind = type(parameter)
    if not issubclass(kind, _Absent) or kind.why is not LOST:
        return False
    parameter.__class__ = kind.own_class
    return True


def _lose(module: nn.Module, names: Container[str]) -> None:
    """Refuse reads of the parameters `names` until they get values again."""
    for name, each in module.named_parameters():
        if name in names:
            each.__class__ = _absent(name, type(each), LOST)


class LeftMemory(TorchFunctionMode):
    """Refuses reads of storages that have held parameters, given by their addresses."""

    def __init__(self, pointers: Iterable[int]) -> None:
        super().__init__()
        self._pointers = frozenset(pointers)

    def __torch_function__(
        self,
        func: Any,  # noqa: ANN401  (a function of torch, which names no type for it)
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Call `func` unless it reads an element of a tensor in one of the storages.

        Raises:
            AbsentParameterError: it does.
        """
        if func not in READS_NOTHING and any(
            isinstance(each, torch.Tensor) and _start(each) in self._pointers
            for each in tree_leaves((args, kwargs))
        ):
            raise AbsentParameterError("memory that held a parameter")
        return func(*args, **(kwargs or {}))


def _start(tensor: torch.Tensor) -> int | None:
    """Return the address of the storage of `tensor`, or None if it has none."""
    if tensor.layout is not torch.strided or not tensor.numel():
        return None
    return tensor.untyped_storage().data_ptr()


def empty_module(module: nn.Module) -> dict[str, torch.Tensor]:
    """Take the parameters of `module` out of it and return them by name.

    The module's parameters keep their shapes but read as NaN.
    """
    taken: dict[str, torch.Tensor] = {}
    for name, parameter in module.named_parameters():
        taken[name] = parameter.data
        parameter.data = parameter.data.new_full((), float("nan")).expand(parameter.shape)
    return taken


@dataclass(frozen=True, slots=True)
class TakenParameters:
    """Parameters by name: `values` as they were taken, and `kept` copies to restore."""

    values: dict[str, torch.Tensor]
    kept: dict[str, torch.Tensor]


@contextmanager
def emptied(module: nn.Module, *, keep: bool) -> Generator[TakenParameters]:
    """Return a context in which `module` is empty; it yields the parameters.

    If the block raises, the module gets back those that are still in `kept`, which holds copies in
    host memory if `keep` is True. Parameters without a value at the end stay unreadable until
    `refill_module` sets them.
    """
    lost = {name for name, each in module.named_parameters() if _found(each)}
    values = empty_module(module)
    kept = {
        name: each.cpu()
        for name, each in values.items()
        if keep and not each.is_meta and name not in lost
    }
    taken = [name for name, each in values.items() if not each.is_meta]
    try:
        with Absence(module):
            yield TakenParameters(values, kept)
    except BaseException:
        _lose(module, taken)
        refill_module(module, kept)
        raise
    _lose(module, taken)


def refill_module(module: nn.Module, values: Mapping[str, torch.Tensor]) -> None:
    """Set parameters of `module` to `values`, in their own data types and devices."""
    for name, parameter in module.named_parameters():
        if name in values:
            _found(parameter)
            parameter.data = values[name].to(dtype=parameter.dtype, device=parameter.device)
