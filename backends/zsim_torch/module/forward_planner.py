"""Run a module's own forward ahead of a micro-batch, without its parameters, to record a plan.

Every torch function whose arguments depend on a parameter is recorded, and called on stand-ins:
tensors on "meta", or with values the first time. Everything else is computed as usual. After the
first time, blocks are not run: their stand-ins look like their first results.
"""

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from zsim_torch.module.absent import READS_NOTHING
from zsim_torch.module.block_result import (
    AliasLeaf,
    BlockResult,
    ConstantLeaf,
    TensorLeaf,
    called_instead,
    cut,
    described,
    empty,
    name_of,
    need_same_arguments,
    only_reads_metadata,
)
from zsim_torch.module.forward_plan import (
    Glue,
    ParameterSymbol,
    PlannedCall,
    PlannedParts,
    Symbol,
    UnitPlan,
)
from zsim_torch.module.planned_function import MARK, need_followed
from zsim_torch.module.saving import version
from zsim_torch.module.unit import ModuleUnitError
from zsim_torch.module.unwritten import UnwrittenMemory

WHOLE, START, AFTER, END = "module", "start", "{}.after", "end"
"""Names of units: the whole module, before the first block, after a block, after the last."""

INSIDE = "_zsim_made_inside"
"""Attribute of tensors with the path of the block that made them."""

FRESH: Final = "_zsim_fresh"
"""Attribute of new tensors without other tensors' memory, with the planner that saw them made."""

_FACTORIES: Final = frozenset(
    {torch.zeros, torch.ones, torch.full, torch.empty}
    | {torch.Tensor.new_zeros, torch.Tensor.new_ones, torch.Tensor.new_full}
)
_WRITES_BUFFERS: Final = frozenset(["batch_norm", "instance_norm"])
_DEVICE, _ON_META = (getattr(torch.Tensor, name).__get__ for name in ("device", "is_meta"))


class ForwardPlanner(TorchFunctionMode):
    """Records calls inside it. Without `results` of an earlier planner, blocks are run."""

    def __init__(self, parts: PlannedParts, results: Sequence[BlockResult] | None = None) -> None:
        super().__init__()
        self.plans: list[UnitPlan] = []
        self.results: list[BlockResult] = []
        self._known = results
        self._parts = parts
        self._glue = Glue()
        self._inside = ""
        self._quiet = False
        self._twins: dict[int, tuple[Tensor, Tensor]] = {}
        self._symbols: set[Symbol] = set()

    @contextmanager
    def watched(self) -> Generator[None]:
        """Return a context in which calls of blocks and functions are recorded."""
        with ExitStack() as stack:
            for path, block in self._parts.blocks.items():
                stack.enter_context(called_instead(block, self._instead_of(path, block)))
            stack.enter_context(self)
            yield

    def close(self, loss: Tensor) -> Symbol:
        """Return the symbol of the loss, which ends the last unit.

        Raises:
            ModuleUnitError: the loss depends on no parameter.
        """
        with self:
            number = loss.reshape(())
        symbol = self._symbol(number)
        if symbol is None:
            raise ModuleUnitError("module: its loss depends on no parameter")
        self._end_glue()
        self.plans[-1].name = WHOLE if len(self.plans) == 1 else END
        return symbol

    def __torch_function__(
        self,
        func: Any,  # noqa: ANN401  (a function of torch, which names no type for it)
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        """Call `func`, and record it if an argument depends on a parameter."""
        if self._quiet:
            return func(*args, **(kwargs or {}))
        if self._inside:
            self._need_given(func, tree_leaves((args, kwargs)))
            return self._marked(func(*args, **(kwargs or {})))
        leaves, spec = tree_flatten((args, dict(kwargs or {})))
        tensors = [each for each in leaves if isinstance(each, Tensor)]
        if not any(self._depends(each) for each in tensors):
            if func not in READS_NOTHING:
                self._need_own(func, tensors)
            made = func(*args, **(kwargs or {}))
            if func in _FACTORIES:
                setattr(made, FRESH, self)
            return made
        if func in (_DEVICE, _ON_META):
            return self._parts.device if func == _DEVICE else self._parts.device.type == "meta"
        if func in READS_NOTHING:
            stood, named = tree_unflatten([self._stand_in(each) for each in leaves], spec)
            return func(*stood, **named)
        self._need_own(func, tensors)
        if tensors[0] is leaves[0] and name_of(func).endswith("_"):
            self._adopt(tensors[0])
        return self._note(func, leaves, spec)

    def _adopt(self, tensor: Tensor) -> None:
        """Make a new tensor, which is about to be written, a value of the unit."""
        if getattr(tensor, FRESH, None) is not self or self._symbol(tensor) is not None:
            return
        symbol = Symbol(self._place, tensor.shape, tensor.dtype, tensor.requires_grad)
        _, spec = tree_flatten(((tensor,), {}))
        copied = PlannedCall(torch.clone, (tensor.clone(),), spec, (symbol,))
        self._glue.calls.append(copied)
        self._stand_in(tensor)
        self._mark(tensor, symbol)

    def _note(self, func: Callable[..., object], leaves: list[object], spec: TreeSpec) -> object:
        """Call `func` on stand-ins, and record it unless it returns only metadata."""
        need_followed(func, self._parts, leaves, self._place)
        stood = [self._stand_in(each) for each in leaves]
        pairs = [
            (each, stand, version(stand))
            for each, stand in zip(leaves, stood, strict=True)
            if isinstance(each, Tensor) and isinstance(stand, Tensor)
        ]
        result = self._called(func, stood, spec)
        planned = [self._planned(each) for each in leaves]
        changes = False
        for each, stand, before in pairs:
            symbol = self._symbol(each)
            if symbol is not None and symbol.maker != self._place:
                self._glue.entered.append((stand, before))
            if version(stand) != before:
                changes = True
                self._need_writable(func, each)
        if not changes and only_reads_metadata(func, result):
            return result
        if isinstance(result, Tensor):
            back = self._back(result)
            returned: object = back[0]
            makes: tuple[Symbol | None, ...] = (back[1],)
        else:
            found, shape = tree_flatten(result)
            both = [self._back(each) for each in found]
            returned = tree_unflatten([each for each, _ in both], shape)
            makes = tuple(symbol for _, symbol in both)
        grad = torch.is_grad_enabled()
        self._glue.calls.append(PlannedCall(func, tuple(planned), spec, makes, grad))
        return returned

    def _called(self, func: Callable[..., object], stood: list[object], spec: TreeSpec) -> object:
        """Return the result of `func` on stand-ins, which have values only the first time.

        Raises:
            ModuleUnitError: `func` needs values.
        """
        args, kwargs = tree_unflatten(stood, spec)
        if self._known is None:
            return func(*args, **kwargs)
        if kwargs.get("device") is not None:
            kwargs["device"] = "meta"
        if func is torch.Tensor.to:
            args = [torch.device("meta") if isinstance(each, str) else each for each in args]
        try:
            return func(*args, **kwargs)
        except (RuntimeError, NotImplementedError, ValueError, TypeError) as error:
            line = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
            raise ModuleUnitError(
                f"module: its forward decides by values between two units, or fails: "
                f"{name_of(func)}: {line}"
            ) from error

    def _back(self, leaf: object) -> tuple[object, Symbol | None]:
        """Return the module's object for a leaf of a result, with its symbol."""
        if not isinstance(leaf, Tensor):
            return leaf, None
        for original, twin in self._twins.values():
            if twin is leaf:
                return original, None
        symbol = Symbol(self._place, leaf.shape, leaf.dtype, leaf.requires_grad)
        self._mark(leaf, symbol)
        return leaf, symbol

    def _mark(self, tensor: Tensor, symbol: Symbol) -> None:
        self._symbols.add(symbol)
        setattr(tensor, MARK, symbol)

    @property
    def _place(self) -> int:
        return len(self.plans)

    def _symbol(self, tensor: Tensor) -> Symbol | None:
        found: Symbol | None = getattr(tensor, MARK, None)
        return found

    def _depends(self, tensor: Tensor) -> bool:
        return id(tensor) in self._parts.names or getattr(tensor, MARK, None) is not None

    def _planned(self, leaf: object) -> object:
        """Return the plan's argument for `leaf`."""
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) in self._parts.names:
            return ParameterSymbol(self._parts.names[id(leaf)])
        return self._symbol(leaf) or leaf

    def _stand_in(self, leaf: object) -> object:
        """Return the stand-in for `leaf` in a call ahead."""
        if isinstance(leaf, torch.device) and self._known is not None:
            return torch.device("meta")
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) in self._parts.names:
            return self._parts.stand_in(self._parts.names[id(leaf)])
        if self._known is None:
            return leaf
        if id(leaf) not in self._twins:
            if self._symbol(leaf) is not None:
                return leaf
            twin = torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device="meta")
            self._twins[id(leaf)] = (leaf, twin)
        return self._twins[id(leaf)][1]

    def _need_own(self, func: object, tensors: Iterable[Tensor]) -> None:
        """Raise ModuleUnitError if a tensor has a gradient but comes from no recorded call."""
        for each in tensors:
            if id(each) in self._parts.names or id(each) in self._parts.buffers:
                continue
            symbol, block = self._symbol(each), getattr(each, INSIDE, None)
            if symbol is not None and symbol not in self._symbols:
                raise ModuleUnitError(
                    f"module: {name_of(func)} reads what an earlier forward left in the module"
                )
            if symbol is None and block is not None:
                raise ModuleUnitError(
                    f"unit {block}: what it makes is read by {name_of(func)} outside it, and it "
                    "does not return it (a hook, or an attribute?)"
                )
            if symbol is not None and symbol.requires_grad != each.requires_grad:
                raise ModuleUnitError(
                    f"module: {name_of(func)} reads what a function of autograd returned, which "
                    "zsim follows inside blocks alone"
                )
            # A leaf may request a gradient that nothing reads: inputs do, for adapters.
            asks = each.requires_grad and (not each.is_leaf or isinstance(each, nn.Parameter))
            lost = asks or (self._known is not None and each.is_meta)
            if symbol is None and lost:
                raise ModuleUnitError(
                    f"module: {name_of(func)} reads a tensor with a gradient that no function of "
                    "torch has returned"
                )

    def _need_given(self, func: object, leaves: Iterable[object]) -> None:
        """Raise ModuleUnitError if a function in a block reads a parameter of another unit."""
        for each in leaves:
            if id(each) in self._parts.names and func not in READS_NOTHING:
                raise ModuleUnitError(
                    f"unit {self._inside}: its forward reads parameter "
                    f"{self._parts.names[id(each)]}, which is not one of its own"
                )

    def _need_writable(self, func: object, tensor: Tensor) -> None:
        """Raise ModuleUnitError if a tensor written in place belongs to another unit."""
        symbol = self._symbol(tensor)
        if symbol is not None and symbol.maker == self._place:
            return
        if id(tensor) in self._parts.buffers and name_of(func) in _WRITES_BUFFERS:
            return
        what = "a parameter" if id(tensor) in self._parts.names else "a tensor"
        raise ModuleUnitError(
            f"module: {name_of(func)} writes {what} in place that another unit or no unit has made"
        )

    def _end_glue(self) -> None:
        """Make a unit of the calls since the last block, if there are any.

        Raises:
            ModuleUnitError: they write the result of another unit in place.
        """
        glue, self._glue = self._glue, Glue()
        for stand, before in glue.entered:
            if version(stand) != before:
                raise ModuleUnitError(
                    "module: what a unit has returned is written in place outside it"
                )
        if glue.calls:
            name = AFTER.format(self.plans[-1].name) if self.plans else START
            self.plans.append(UnitPlan(name, calls=glue.calls))

    def _instead_of(self, path: str, block: nn.Module) -> Callable[..., object]:
        def instead(*args: object, **kwargs: object) -> object:
            return self._block(path, block, args, kwargs)

        return instead

    def _block(
        self, path: str, block: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> object:
        """Record a call of a block, and return the stand-in for its result."""
        leaves, spec = tree_flatten((args, kwargs))
        # A parameter of another unit enters as a value, not as memory that may be freed.
        leaves = [
            each.clone() if isinstance(each, Tensor) and id(each) in self._parts.names else each
            for each in leaves
        ]
        self._need_own(block.__class__, [each for each in leaves if isinstance(each, Tensor)])
        self._end_glue()
        place, number = self._place, len(self.results)
        called = sum(each.block == path for each in self.plans)
        name = f"{path}@{called + 1}" if called else path
        planned = tuple(self._planned(each) for each in leaves)
        self._quiet = True
        try:
            if self._known is None:
                given = [cut(each) if isinstance(each, Tensor) else each for each in leaves]
                with self._parts.watch(path):
                    output = self._output(path, block, given, spec)
                result, fresh = described(path, given, output)
            else:
                result, fresh = self._expected(path, number), {}
            self.results.append(result)
            returned: list[object] = []
            makes: list[Symbol | None] = []
            for index, leaf in enumerate(result.leaves):
                symbol, back = None, None
                match leaf:
                    case AliasLeaf(argument=argument):
                        back = leaves[argument]
                    case ConstantLeaf():
                        back = leaf.value
                    case TensorLeaf():
                        symbol = Symbol(place, leaf.shape, leaf.dtype, leaf.requires_grad)
                        stand = fresh[index] if fresh else empty(leaf)
                        self._mark(stand, symbol)
                        back = stand
                returned.append(back)
                makes.append(symbol)
        finally:
            self._quiet = False
        call = PlannedCall(None, planned, spec, tuple(makes), result=result)
        self.plans.append(UnitPlan(name, block=path, calls=[call]))
        return tree_unflatten(returned, result.spec)

    def _expected(self, path: str, number: int) -> BlockResult:
        """Return the first result of call `number` of a block.

        Raises:
            ModuleUnitError: that call was to another block, or does not exist.
        """
        assert self._known is not None
        before = self._known[number].path if number < len(self._known) else "none"
        if before != path:
            raise ModuleUnitError(
                f"module: its forward calls {path} as block {number + 1}, in the first it was "
                f"{before}; blocks must be called in one order"
            )
        return self._known[number]

    def _output(
        self, path: str, block: nn.Module, given: Sequence[object], spec: TreeSpec
    ) -> object:
        """Run a block on tensors with values."""
        args, kwargs = tree_unflatten(given, spec)
        # Contiguous copies that live during the call: a block may view a parameter freely.
        names = {
            name: self._parts.stand_in(self._parts.names[id(each)]).contiguous()
            for name, each in block.named_parameters()
        }
        self._inside, self._quiet = path, False
        try:
            with (
                called_instead(block, None),
                UnwrittenMemory(path, names, given, watches_hooks=True),
            ):
                made = functional_call(block, names, args, kwargs)
        finally:
            self._inside, self._quiet = "", True
        need_same_arguments(path, given, (args, kwargs))
        return made

    def _marked(self, result: object) -> object:
        """Mark tensors made in a block, to recognize those that it does not return."""
        for each in tree_leaves(result):
            if isinstance(each, Tensor) and id(each) not in self._parts.buffers:
                setattr(each, INSIDE, self._inside)
        return result
