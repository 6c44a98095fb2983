"""Axes of a study: the choices that vary from run to run, and their combinations."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, cast

from zsim.scenario.changes import Changes, flat
from zsim.scenario.tables import ScenarioError, need_field
from zsim_study.study.file import AxisTable, StudyError


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One choice on an axis: its name, and the fields that it changes."""

    label: str
    changes: Changes


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyAxis:
    """Axis of a study with its choices."""

    name: str
    choices: tuple[Choice, ...]

    @property
    def fields(self) -> tuple[str, ...]:
        """Fields that at least one choice changes, in order."""
        return tuple(dict.fromkeys(field for each in self.choices for field in each.changes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Combination:
    """A choice on each axis."""

    labels: tuple[str, ...]
    changes: Changes

    def named(self, axes: Sequence[StudyAxis]) -> str:
        """Return the name of the combination, such as `stage=3, NICs=8`."""
        pairs = zip(axes, self.labels, strict=True)
        return ", ".join(f"{axis.name}={label}" for axis, label in pairs)


def axes_of(tables: Iterable[AxisTable]) -> tuple[StudyAxis, ...]:
    """Return the axes that `[[axis]]` tables describe.

    Raises:
        StudyError: an axis has no form or two, lists of different lengths, no field, an unknown
            field, a field of another axis, or two choices or axes share a name.
    """
    found: list[StudyAxis] = []
    where: dict[str, str] = {}
    for index, table in enumerate(tables):
        try:
            axis = _axis(table)
        except StudyError as error:
            raise StudyError(f"axis.{index}.{error}") from None
        for field in axis.fields:
            if field in where:
                raise StudyError(f"axis.{index}: {field} is on axis {where[field]!r} too")
            where[field] = axis.name
        if axis.name in {each.name for each in found}:
            raise StudyError(f"axis.{index}.name: {axis.name!r} is the name of two axes")
        found.append(axis)
    return tuple(found)


def combinations(axes: Sequence[StudyAxis]) -> Iterator[Combination]:
    """Yield every combination of choices; the last axis varies fastest."""
    for choices in product(*(axis.choices for axis in axes)):
        changes = {field: value for each in choices for field, value in each.changes.items()}
        yield Combination(labels=tuple([each.label for each in choices]), changes=changes)


def _axis(table: AxisTable) -> StudyAxis:
    given = [name for name in ("values", "zip", "variants") if getattr(table, name) is not None]
    if len(given) != 1:
        both = " and ".join(given) or "none"
        raise StudyError(f"values: {both} given; an axis has one of values, zip, variants")
    if (table.field is None) == (table.values is not None):
        raise StudyError("field: stands with values, and values with it")
    if table.variants is not None:
        if table.labels is not None:
            raise StudyError("labels: variants have names already")
        name = table.name or "variant"
        columns = {label: flat(each) for label, each in table.variants.items()}
        choices = tuple(Choice(label=label, changes=each) for label, each in columns.items())
    else:
        lists = table.zip or {table.field or "": table.values or ()}
        name = table.name or next(iter(lists), "").rpartition(".")[2]
        choices = _zipped(lists, table.labels)
    if not choices:
        raise StudyError(f"{given[0]}: empty; an axis has at least one choice")
    axis = StudyAxis(name=name, choices=choices)
    if not axis.fields:
        named = ", ".join(each.label for each in choices)
        raise StudyError(f"{given[0]}: {named} of axis {name!r} change nothing; give one a field")
    for field in axis.fields:
        try:
            need_field(field)
        except ScenarioError as error:
            raise StudyError(f"{given[0] if table.field is None else 'field'}: {error}") from None
    labels = [each.label for each in choices]
    for label in labels:
        if labels.count(label) > 1:
            raise StudyError(f"{given[0]}: {label!r} is there twice")
    return axis


def _zipped(
    lists: Mapping[str, tuple[Any, ...]], labels: tuple[str, ...] | None
) -> tuple[Choice, ...]:
    """Return one choice per index of lists of equal length."""
    lengths = {field: len(each) for field, each in lists.items()}
    if labels is not None:
        lengths["labels"] = len(labels)
    if len(set(lengths.values())) > 1:
        counts = ", ".join(f"{field} has {length}" for field, length in lengths.items())
        raise StudyError(f"zip: lists must be equally long: {counts}")
    rows = [dict(zip(lists, values, strict=True)) for values in zip(*lists.values(), strict=True)]
    names = labels or [" x ".join(shown(value) for value in row.values()) for row in rows]
    return tuple(Choice(label=name, changes=row) for name, row in zip(names, rows, strict=True))


def shown(value: object) -> str:
    """Return the value of a field as the text of a label."""
    match value:
        case bool():
            return str(value).lower()
        case float() if value.is_integer() and abs(value) < 1e15:
            return str(int(value))
        case list():
            return f"[{', '.join(shown(each) for each in cast('list[object]', value))}]"
        case dict():
            table = cast("dict[str, object]", value)
            return ", ".join(f"{name} {shown(each)}" for name, each in table.items())
        case _:
            return str(value)
