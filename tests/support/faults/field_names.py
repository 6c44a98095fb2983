"""Names of the fields of structs and dataclasses."""

import dataclasses

from msgspec import Struct


def field_names(value: object) -> tuple[str, ...]:
    """Return the names of the fields from which a struct or dataclass is made; else none."""
    if isinstance(value, Struct):
        return value.__struct_fields__
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return tuple(each.name for each in dataclasses.fields(value) if each.init)
    return ()
