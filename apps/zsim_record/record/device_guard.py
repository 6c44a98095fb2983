"""The device guard of the pretended accelerator, which outlives exceptions in backward.

torch asks a guard for its device type whenever it sets a stream, also in destructors while an
exception leaves a hook of backward. Python cannot return a value while an exception is pending:
without the steps below the process would abort.
"""

# pyright: reportPrivateUsage=false
# Private names of torch are listed in tests/unit/torch/record/test_recording.py.

import ctypes
from typing import Any

import torch

_accelerator: Any = torch._C
_TYPE = _accelerator._autograd.DeviceType.PrivateUse1
_caught: list[BaseException] = []

_occurred = ctypes.PYFUNCTYPE(None)(("PyErr_Occurred", ctypes.pythonapi))
"""Raises the pending exception of this thread, if there is one, as ctypes does after each call."""


def _type() -> object:
    """Return the device type; keep the pending exception. Only its first step may fail."""
    try:
        _occurred()
    except BaseException as error:  # of any kind: it is raised again when backward ends
        _caught.append(error)
    return _TYPE


class _DeviceGuard(_accelerator._acc.DeviceGuard):  # type: ignore[misc]  # torch gives it no type
    def type_(self) -> object:
        """Return the device type."""
        return _type()


def device_guard() -> object:
    """Return the guard for `torch`; it must be found without a failing look-up in its instance."""
    guard = _DeviceGuard()
    setattr(guard, "type_", _type)  # noqa: B010  (mypy: a method)
    return guard


def take_caught() -> BaseException | None:
    """Return the first exception kept since the last call, or None; forget all."""
    first = next(iter(_caught), None)
    _caught.clear()
    return first
