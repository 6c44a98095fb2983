"""Operations are immutable values, which are copied with other fields."""

import copy
import pickle
from dataclasses import FrozenInstanceError, dataclass

import pytest
from msgspec import Struct

from zsim.schedule.operation import Copy, Operand, OperationError, Previous, Read, Role, View
from zsim.schedule.replace import replace
from zsim.schedule.schedule import Pool

VIEW = View(buffer="source", size=2)
MADE = (
    VIEW,
    Previous("copy"),
    Operand(role=Role.INPUT, view=VIEW),
    Copy(id="copy", stream="compute", source=VIEW, target=VIEW, divisor=3),
    Read(id="read", stream="nvme_read", source=VIEW, target=VIEW, after=("copy",)),
)


@pytest.mark.parametrize("made", MADE)
def test_an_operation_is_frozen_and_equal_to_its_copies(made: Struct) -> None:
    for name in made.__struct_fields__:
        with pytest.raises(AttributeError):
            setattr(made, name, None)
    copies = [copy.copy(made), copy.deepcopy(made), pickle.loads(pickle.dumps(made)), replace(made)]
    assert {*copies, made} == {made}
    assert {type(each) for each in (*copies, made)} == {type(made)}
    assert not hasattr(made, "__dict__")


def test_a_copy_of_a_struct_or_a_dataclass_has_the_other_fields() -> None:
    assert replace(VIEW, size=3) == View(buffer="source", size=3)
    pool = replace(Pool(name="device"), slot_bytes=4)
    assert pool == Pool(name="device", slot_bytes=4)
    with pytest.raises(FrozenInstanceError):
        pool.slot_bytes = 5  # type: ignore[misc]  # it is frozen


def test_a_copy_with_an_invalid_or_unknown_field_is_refused() -> None:
    with pytest.raises(OperationError, match="start -1 and size 2 must be >= 0"):
        replace(VIEW, start=-1)
    for value in (VIEW, Pool(name="device"), 3):
        with pytest.raises(TypeError):
            replace(value, unknown=1)


def test_a_subclass_of_an_operation_has_its_checks() -> None:
    @dataclass
    class _Unrelated:
        divisor: int

    with pytest.raises(OperationError, match="a Read copies bytes as they are"):
        replace(MADE[4], divisor=2)
    assert replace(_Unrelated(1), divisor=2) == _Unrelated(2)
