"""Refuse in-place writes by a unit to its parameters and its inputs.

A schedule passes copies of gathered parameters to a unit, and frees them. A unit that is recomputed
for backward gets the same inputs again. Writes to either would be lost, or applied twice. A hook on
an input would see the gradient of this unit only, not that of all readers.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from zsim_torch.module.saving import version
from zsim_torch.module.unit import ModuleUnitError


class UnwrittenMemory(TorchFunctionMode):
    """Refuses writes to the parameters of a unit, given by name, and to its inputs.

    It checks every torch function, since `parameter.data` has its own version counter. With
    `watches_hooks`, hooks on inputs are refused, too; leave it off for a FLOP counter, which adds
    such hooks.

    Raises:
        ModuleUnitError: a parameter or input is written.
    """

    def __init__(
        self,
        unit: str,
        parameters: Mapping[str, Tensor],
        given: Iterable[object],
        *,
        watches_hooks: bool = False,
    ) -> None:
        super().__init__()
        self._unit = unit
        tensors = [each for each in given if isinstance(each, Tensor)]
        self._what = {_start(each): "what it is called with" for each in tensors}
        self._what |= {_start(each): f"parameter {name}" for name, each in parameters.items()}
        self._what.pop(None, None)
        self._unhooked = {id(each) for each in given} if watches_hooks else set[int]()
        self._watched = [*parameters.values(), *tensors]
        self._versions: list[int] = []

    def __enter__(self) -> Self:
        self._versions = [version_of(each) for each in self._watched]
        super().__enter__()  # type: ignore[no-untyped-call]  # torch's
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:  # noqa: ANN401  (torch's own)
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]  # torch's
        if error is None:  # an autograd function can write without calling torch functions
            self._need_unwritten(self._watched, self._versions)

    def __torch_function__(
        self,
        func: Any,  # noqa: ANN401  (a function of torch, which names no type for it)
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Call `func`, then compare the versions of its arguments."""
        call: Callable[..., object] = func
        if func is torch.Tensor.register_hook and id(args[0]) in self._unhooked:
            raise ModuleUnitError(
                f"unit {self._unit}: its forward puts a hook on what it is called with; put it on "
                "what a unit makes"
            )
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        before = [version_of(each) for each in tensors]
        result = call(*args, **(kwargs or {}))
        self._need_unwritten(tensors, before)
        return result

    def _need_unwritten(self, tensors: Iterable[Tensor], before: Iterable[int]) -> None:
        for each, known in zip(tensors, before, strict=True):
            what = None if version_of(each) == known else self._what.get(_start(each))
            if what is not None:
                raise ModuleUnitError(
                    f"unit {self._unit}: its forward writes {what} in place (inplace=True? "
                    "no_grad?); make a new tensor, or write between two trainings"
                )


def version_of(tensor: Tensor) -> int:
    """Return the version of `tensor`; 0 in inference mode, which has no versions."""
    return 0 if tensor.is_inference() else version(tensor)


def _start(tensor: Tensor) -> int | None:
    """Return the address of the memory of `tensor`, or None; tensors of `torch.func` have none."""
    if tensor.layout is not torch.strided or not tensor.numel():
        return None
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:
        return None
