"""Errors of the options of a runtime."""

from zsim.dtype import DType


class SettingError(ValueError):
    """An option outside what is allowed; the message starts with its name."""


def at_least(least: int, **options: int | None) -> None:
    """Return if every option that is given is `least` or more.

    Raises:
        SettingError: one is less.
    """
    for name, value in options.items():
        if value is not None and value < least:
            raise SettingError(f"{name}: {value} must be at least {least}")


def floating(**options: DType | None) -> None:
    """Return if every format that is given is one of fractions: gradients are averaged in it.

    Raises:
        SettingError: one is a format of whole numbers.
    """
    for name, value in options.items():
        if value in (DType.INT8, DType.INT64):
            raise SettingError(f"{name}: {value} must be fp16, bf16, fp32 or fp64")
