"""Record a module run on the device "meta": the operators, reads and saved tensors of each unit.

Operators belong to a window: one for each call of a unit, one before the first and one after the
last. Operators after a unit and before the next one belong to the former.
"""

from bisect import bisect_right
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zsim.model.kernel import Kernel
from zsim_torch.module.norm import by_root_mean_square
from zsim_torch.module.operator_kernel import kernel_of, storage_of
from zsim_torch.observe.observer import ALL, Maker, Meter

START, END = "start", "end"
"""Names of the windows before the first unit and after the last."""


@dataclass(slots=True)
class CapturedStorage:
    """A storage: the window that made it, and whether a gradient flows through it."""

    window: int
    dtype: torch.dtype
    size_bytes: int
    differentiable: bool
    kept: torch.UntypedStorage


@dataclass(slots=True)
class UnitWindow:
    """Everything that ran during one call of a unit. Storages are numbered by first use."""

    name: str
    parameters: dict[str, None] = field(default_factory=dict[str, None])
    reads: dict[int, None] = field(default_factory=dict[int, None])
    saves: dict[int, None] = field(default_factory=dict[int, None])
    forward: list[Kernel] = field(default_factory=list[Kernel])
    backward: list[Kernel] = field(default_factory=list[Kernel])
    forward_levels: list[int] = field(default_factory=list[int])
    backward_levels: list[int] = field(default_factory=list[int])


class WindowMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Assigns operators to windows, in forward and in backward."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.windows = [UnitWindow(START)]
        self.is_backward = False
        self._begins = [0]
        self._end = 0
        self._latest = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, because excluding these frames would import torch's compiler (2.5 s)."""
        return False

    def enter(self, name: str) -> None:
        """Start a window called `name`."""
        self.windows.append(UnitWindow(name))
        self._begins.append(_next_node())
        self._latest += 1

    def keep(self, tensor: Tensor) -> Tensor:
        """Return `tensor`, which autograd saves for backward."""
        return tensor

    @contextmanager
    def backward(self) -> Generator[None]:
        """Return a context in which operators belong to the window whose forward they undo."""
        self.is_backward = True
        self._end = _next_node()
        try:
            yield
        finally:
            self.is_backward = False

    def window(self) -> UnitWindow:
        """Return the window of the current operator.

        In backward, the current autograd node decides; otherwise it is the last window.
        """
        number = _number_of_node() if self.is_backward else None
        if number is not None and number < self._end:  # a recomputed operator belongs to its node
            self._latest = max(bisect_right(self._begins, number) - 1, 0)
        return self.windows[self._latest]


class LiveBytes(WindowMode):  # type: ignore[no-untyped-call]
    """Records the live bytes of storages made inside it, after each operator.

    The first number of a window is that before its first operator.
    """

    def __init__(self, known: Sequence[Tensor]) -> None:
        super().__init__()
        self._meter = Meter()
        self._known = {storage_of(each) for each in known}

    def _live(self) -> int:
        return self._meter.total(ALL)

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401  (an operator: torch names no type for it)
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Run `func`, then record the live bytes."""
        window, before = self.window(), self._live()
        levels = window.backward_levels if self.is_backward else window.forward_levels
        if not levels:
            levels.append(before)
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if isinstance(each, Tensor) and storage_of(each) not in self._known:
                self._meter.see(each, Maker.OTHER)
        levels.append(self._live())
        return result


class Capture(WindowMode):  # type: ignore[no-untyped-call]
    """Records operators inside it. `parameters` and `constants` (buffers) are not counted."""

    def __init__(self, parameters: Mapping[str, Tensor], constants: Sequence[Tensor]) -> None:
        super().__init__()
        self.storages: dict[int, CapturedStorage] = {}
        self.parameters = {storage_of(each): name for name, each in parameters.items()}
        self.constants = {storage_of(each) for each in constants}
        self._alive = [*parameters.values(), *constants]

    def batch(self, tensors: Sequence[Tensor]) -> None:
        """Register these tensors as the batch, which existed before."""
        for tensor in tensors:
            self._note(tensor, window=-1, differentiable=False)

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401  (an operator: torch names no type for it)
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Run `func`, then record its kernel and the memory that it reads and makes."""
        result = func(*args, **(kwargs or {}))
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        made = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
        kernel = kernel_of(func, args, kwargs or {}, result, backward=self.is_backward)
        if self.is_backward:
            if kernel is not None:
                self.window().backward.append(kernel)
            return result
        here = len(self.windows) - 1
        window = self.windows[here]
        for each in given:
            self._read(window, each)
        flows = any(self._differentiable(each) for each in given)
        for each in made:
            self._note(each, window=here, differentiable=flows and each.is_floating_point())
        if kernel is not None:
            window.forward.append(kernel)
        return result

    def keep(self, tensor: Tensor) -> Tensor:
        """Record `tensor`, which autograd saves for backward."""
        number = storage_of(tensor)
        if tensor.numel() and number not in self.parameters and number not in self.constants:
            self._note(tensor, window=len(self.windows) - 1, differentiable=False)
            self.windows[-1].saves[number] = None
        return tensor

    def _read(self, window: UnitWindow, tensor: Tensor) -> None:
        number = storage_of(tensor)
        if number in self.parameters:
            window.parameters[self.parameters[number]] = None
        elif number not in self.constants:
            window.reads[number] = None

    def _differentiable(self, tensor: Tensor) -> bool:
        number = storage_of(tensor)
        known = self.storages.get(number)
        return number in self.parameters or (known is not None and known.differentiable)

    def _note(self, tensor: Tensor, *, window: int, differentiable: bool) -> None:
        number = storage_of(tensor)
        if number in self.parameters or number in self.constants:
            return
        if number in self.storages:
            self.storages[number].differentiable |= differentiable
            return
        storage = tensor.untyped_storage()
        self.storages[number] = CapturedStorage(
            window, tensor.dtype, storage.nbytes(), differentiable, storage
        )


def _next_node() -> int:
    """Return the sequence number of the next autograd node."""
    counter: Any = vars(torch.autograd)["_get_sequence_nr"]  # torch has no public name
    return int(counter())


def _number_of_node() -> int | None:
    """Return the sequence number of the running autograd node, or None."""
    node: Any = torch._C._current_autograd_node()  # pyright: ignore[reportPrivateUsage]
    return None if node is None else int(node._sequence_nr())


def watched(
    capture: WindowMode, module: nn.Module, units: Mapping[str, nn.Module], run: "MetaCall"
) -> Tensor:
    """Run forward and backward while `capture` records the calls of `units`; return the loss."""
    handles = []
    for name, unit in units.items():
        handles += [
            unit.register_forward_pre_hook(lambda *_, name=name: capture.enter(name)),
            unit.register_forward_hook(lambda *_: capture.enter(END)),
        ]
    saving = saved_tensors_hooks(capture.keep, lambda kept: kept)
    try:
        with torch.device("meta"), _as_on_a_gpu(), torch.enable_grad(), capture:
            with saving:
                loss = run.forward(module)
            wanted = [each for each in run.parameters if each.requires_grad]
            with capture.backward():
                torch.autograd.grad(loss, wanted, allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
    return loss


@dataclass(frozen=True, slots=True)
class MetaCall:
    """One call of a module with parameters, buffers and inputs on "meta"."""

    values: dict[str, Tensor]
    parameters: tuple[Tensor, ...]
    inputs: tuple[object, ...]

    def forward(self, module: nn.Module) -> Tensor:
        """Return the loss: the output if it is one number, else the mean of its first tensor.

        Raises:
            ValueError: it returns no floating-point tensor that depends on a parameter.
        """
        result = torch.func.functional_call(module, self.values, self.inputs)
        leaves = list(tree_leaves(result))
        found = [each for each in leaves if isinstance(each, Tensor) and each.requires_grad]
        if not found:
            raise ValueError("it returns no tensor that depends on a parameter")
        return found[0] if found[0].numel() == 1 else found[0].float().mean()


ATTENTION_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
"""Arguments of torch's own function, in order."""


@contextmanager
def _as_on_a_gpu() -> Generator[None]:
    """Return a context in which attention and RMSNorm save the same tensors as on a GPU.

    On "meta", torch would decompose them.
    """
    attention = functional.scaled_dot_product_attention

    def fused(*arguments: Any, **keywords: Any) -> Tensor:  # noqa: ANN401  (torch's own)
        given = dict(zip(ATTENTION_ARGUMENTS, arguments, strict=False)) | keywords
        query, key, value = (given[name] for name in ATTENTION_ARGUMENTS[:3])
        if query.dim() != 4 or query.shape[-1] != value.shape[-1]:
            return attention(*arguments, **keywords)
        made: Tensor = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query,
            key,
            value,
            0.0,
            given.get("is_causal", False),
            attn_mask=given.get("attn_mask"),
            scale=given.get("scale"),
        )[0]
        return made

    def normed(
        rows: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
    ) -> Tensor:
        if weight is None or len(shape) != 1:
            return torch.rms_norm(rows, shape, weight, eps)
        return by_root_mean_square(rows, weight)

    with (
        patch.object(functional, "scaled_dot_product_attention", fused),
        patch.object(functional, "rms_norm", normed),
    ):
        yield
