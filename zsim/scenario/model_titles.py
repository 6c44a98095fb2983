"""A line on each model of a family: its published size. No shape is checked, to be fast."""

import tomllib
from collections.abc import Iterable, Mapping
from typing import Any

from zsim.units import format_count


def published_size(model: Mapping[str, Any]) -> str:
    """Return the published number of parameters of a model, a table of its family, as text."""
    if (parameters := model.get("parameters")) is not None:
        return f"{int(parameters):,} parameters"
    stored, shape = model.get("stored_parameters"), model["shape"]
    if stored is None:
        return f"{format_count(int(model.get('rounded_parameters') or 0))} parameters, rounded"
    again = int(shape.get("vocab_size") or 0) * int(shape.get("hidden_size") or 0)
    return f"{int(stored) - again:,} parameters and {again:,} stored twice"


def model_titles(families: Iterable[str]) -> dict[str, str]:
    """Return family and published size of each model in the TOML of families, by its name."""
    return {
        model["name"]: f"{family['family']}, {published_size(model)}"
        for family in map(tomllib.loads, families)
        for model in family.get("model", ())
    }
