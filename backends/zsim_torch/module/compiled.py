"""Modules that `torch.compile` has compiled in place, with `Module.compile`."""

import sys
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any, Final, ParamSpec, TypeVar

from torch import nn

COMPILED_CALL: Final = "_compiled_call_impl"
"""Attribute in which torch keeps what is called instead of a module's own call."""

P = ParamSpec("P")
R = TypeVar("R")


def is_compiled(module: nn.Module) -> bool:
    """Return whether `module`, or one in it, is compiled."""
    return any(vars(each).get(COMPILED_CALL) is not None for each in module.modules())


@contextmanager
def uncompiled(modules: Iterable[nn.Module]) -> Generator[None]:
    """Run `modules` as they are written inside.

    The compiler gives up a function for good that it meets under a dispatch mode, such as those
    that a module is described with.
    """
    found = [each for each in modules if vars(each).get(COMPILED_CALL) is not None]
    kept = [vars(each)[COMPILED_CALL] for each in found]
    for each in found:
        vars(each)[COMPILED_CALL] = None
    try:
        yield
    finally:
        for each, call in zip(found, kept, strict=True):
            vars(each)[COMPILED_CALL] = call


def kept_from_compiler(function: Callable[P, R]) -> Callable[P, R]:
    """Return `function`, which the compiler leaves alone where compiled code calls it."""
    compiler: Any = sys.modules.get("torch._dynamo")
    if compiler is None:  # nothing is compiled yet; to import it takes seconds
        return function
    left_alone: Callable[P, R] = compiler.disable(function)
    return left_alone
