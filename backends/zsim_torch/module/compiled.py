"""Modules that `torch.compile` has compiled in place, with `Module.compile`."""

import sys
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any, Final, ParamSpec, TypeVar

from torch import nn

COMPILED_CALL: Final = "_compiled_call_impl"
"""Attribute in which torch stores the function that replaces a module's call."""

P = ParamSpec("P")
R = TypeVar("R")


def is_compiled(module: nn.Module) -> bool:
    """Return True if `module` or one of its submodules is compiled."""
    return any(vars(each).get(COMPILED_CALL) is not None for each in module.modules())


@contextmanager
def uncompiled(modules: Iterable[nn.Module]) -> Generator[None]:
    """Return a context in which `modules` run uncompiled.

    The compiler permanently gives up on a function that it meets under a dispatch mode, such as
    those that describe a module.
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
    """Return `function` wrapped so that the compiler does not trace it."""
    compiler: Any = sys.modules.get("torch._dynamo")
    if compiler is None:  # nothing is compiled yet, and importing it takes seconds
        return function
    left_alone: Callable[P, R] = compiler.disable(function)
    return left_alone
