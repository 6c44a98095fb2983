"""Copies with other names are equal to those of `dataclasses.replace`."""

from dataclasses import fields, replace

import pytest

from zsim.dtype import DType
from zsim.model.model import Parameter, Segment, Value
from zsim.model.transformer.block import copier

VALUE = Value(name="old", elements=3, dtype=DType.BF16, requires_gradient=False)
SEGMENT = Segment(
    inputs=("given",),
    outputs=(VALUE,),
    parameters=("weight",),
    saved_bytes=7,
    reduces_output=True,
    gathers_context=True,
)


@pytest.mark.parametrize("old", [VALUE, Parameter(name="old", shape=(2, 3), frozen=True)])
def test_a_copy_with_another_name_is_what_replace_makes(old: Value | Parameter) -> None:
    made = copier(type(old), "name")(old, "new")
    assert made == replace(old, name="new")
    assert old.name == "old"


def test_a_copy_keeps_derived_fields() -> None:
    made = copier(Segment, "inputs", "parameters")(SEGMENT, ("other",), ())
    expected = replace(SEGMENT, inputs=("other",), parameters=())
    for each in fields(Segment):
        assert getattr(made, each.name) == getattr(expected, each.name)


def test_a_copy_needs_a_value_for_each_of_its_fields() -> None:
    with pytest.raises(ValueError, match="shorter"):
        copier(Value, "name", "elements")(VALUE, "new")
