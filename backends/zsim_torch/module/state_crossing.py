"""Find Python objects that pass values between a block and the code between blocks.

Code between blocks runs ahead of a micro-batch, before its blocks. A value that a block leaves for
this code arrives too late, and a change by this code after a block has read the value comes too
early. Both are detected in the first forward.
"""

import inspect
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Final

from torch import nn

from zsim_torch.module.block_result import PLAIN
from zsim_torch.module.object_state import same
from zsim_torch.module.python_state import FOREIGN, Location, PythonState, functions_of
from zsim_torch.module.unit import ModuleUnitError

_GET: Final = "__getattribute__"
_MISSING: Final = object()

Reads = dict[tuple[int, str], nn.Module]
"""Attributes of modules that were read, with their modules."""


@dataclass(slots=True)
class StateCrossing:
    """Refuses Python objects that pass values between blocks and other code in one forward.

    Reads of module attributes are observed. Globals, cells and defaults count as read by the
    functions that name them.
    """

    state: PythonState
    functions: Mapping[str, list[object]]
    """Functions that a block may run, by its path; "" for those between blocks."""

    late_reads: Reads = field(default_factory=Reads)
    """Attributes that code between blocks has read after the first block."""
    _inside: str = ""
    _left: dict[Location, tuple[str, str]] = field(default_factory=dict[Location, tuple[str, str]])
    """Changes by blocks that have run: the name of the object, and the path of the block."""
    _reads: dict[str, Reads] = field(default_factory=dict[str, Reads])

    @classmethod
    def of(
        cls,
        module: nn.Module,
        blocks: Mapping[str, nn.Module],
        around: Iterable[nn.Module],
        loss: object,
    ) -> "StateCrossing":
        """Return a checker that starts with the objects that `module` reaches now."""
        functions = {
            path: [each for part in block.modules() for each in functions_of(part)]
            for path, block in blocks.items()
        }
        functions[""] = [loss, *(each for part in around for each in functions_of(part))]
        return cls(PythonState.of([module, loss], copies=False), functions)

    @contextmanager
    def watched(self) -> Generator[None]:
        """Return a context in which attribute reads are observed.

        Raises:
            ModuleUnitError: the forward inside passes a value between blocks and other code.
        """
        before = vars(nn.Module).get(_GET)
        own: Callable[[Any, str], Any] = getattr(nn.Module, _GET)

        def reading(module: Any, name: str) -> object:  # noqa: ANN401  (any attribute)
            found = self._reads.setdefault(self._inside, {})
            if name[:2] != "__":
                found[id(module), name] = module
            elif name == "__dict__" and _is_users(inspect.currentframe()):
                found |= dict.fromkeys(((id(module), key) for key in own(module, name)), module)
            return own(module, name)

        setattr(nn.Module, _GET, reading)
        try:
            yield
        finally:
            if before is None:
                delattr(nn.Module, _GET)
            else:
                setattr(nn.Module, _GET, before)
        self._end_between()

    @contextmanager
    def block(self, path: str) -> Generator[None]:
        """Return a context for the run of a block."""
        self._end_between()
        self._inside = path
        try:
            yield
        finally:
            self._inside = ""
        changed = self.state.advance()
        self._left |= {where: (name, path) for where, name in changed.items()}
        self._reads.pop("", None)

    def _end_between(self) -> None:
        """Raise ModuleUnitError if code since the last block made a forbidden read or change."""
        if len(self._reads) > 1 or "" not in self._reads:  # a block has run
            self.late_reads |= self._reads.get("", {})
        late = self._found(self._left, "")
        if late is not None:
            name, path = self._left[late]
            raise ModuleUnitError(
                f"unit {path}: its forward changes {name}, which code between blocks reads in the "
                "same forward; return it"
            )
        changed = self.state.advance()
        for path in self._reads:
            early = self._found(changed, path) if path else None
            if early is not None:
                raise ModuleUnitError(
                    f"module: its forward changes {changed[early]} after unit {path} has read it; "
                    "change it before the first block, or in the block"
                )

    def _found(self, changed: Mapping[Location, object], path: str) -> Location | None:
        """Return a changed location that was read between blocks, or in the block at `path`."""
        if not changed:
            return None
        roots: list[object] = []
        for where, module in self._reads.get(path, {}).items():
            for number in (id(module), *map(id, type(module).__mro__)):
                if (number, where[1]) in changed:
                    return number, where[1]
            table = vars(module)
            value = table.get(where[1], table["_buffers"].get(where[1]))
            if not isinstance(value, (nn.Module, *PLAIN)):
                roots.append(value)
        reached = PythonState.of(
            [*roots, *self.functions[path]], copies=False, follows_modules=False
        )
        return next((each for each in changed if reached.reads(each)), None)


def _is_users(frame: FrameType | None) -> bool:
    """Return True if code outside torch and zsim called the function that runs in `frame`."""
    caller = None if frame is None else frame.f_back
    name = "" if caller is None else str(caller.f_globals.get("__name__"))
    return name.split(".")[0] not in FOREIGN


class LateReads:
    """Plain attributes that code between blocks reads after a block: blocks must not change them.

    The first forward detects most cases. This check catches a block that changes one only later.
    """

    def __init__(self, reads: Reads) -> None:
        self._places = [
            (vars(module), name)
            for (_, name), module in reads.items()
            if isinstance(vars(module).get(name, _MISSING), PLAIN)
        ]
        self._values: list[object] = []

    def note(self) -> None:
        """Record the values, after code between blocks has run ahead."""
        self._values = [table.get(name) for table, name in self._places]

    def need_unchanged(self) -> None:
        """Raise ModuleUnitError if a block has changed one of the values since."""
        for before, (table, name) in zip(self._values, self._places, strict=True):
            if not same(before, table.get(name)):
                raise ModuleUnitError(
                    f"module: a block changes {name}, which code between blocks reads in the same "
                    "forward; return it"
                )
