"""Copy an immutable value with other fields, as `copy.replace` of Python 3.13 does."""

import dataclasses
from typing import Any, TypeVar, cast

from msgspec import Struct

Value = TypeVar("Value")


def replace(value: Value, /, **changes: Any) -> Value:  # noqa: ANN401 (values of any field)
    """Return `value`, a struct or a dataclass, with the fields in `changes`.

    Raises:
        TypeError: it is of neither kind, or has no such field.
    """
    if isinstance(value, Struct):
        return value.__replace__(**changes)
    return cast("Value", dataclasses.replace(cast("Any", value), **changes))
