"""A class with a quick `__init__` is the frozen dataclass that it is without, to everyone else."""

import copy
import inspect
import pickle
from dataclasses import FrozenInstanceError, dataclass, field, fields, replace

import pytest

from zsim.schedule.operation import Copy, Operand, Read, Role, View
from zsim.schedule.quick_init import quick_init, quick_maker, quick_replacer


@dataclass(frozen=True, slots=True)
class Plain:
    """Two fields, the first given by place."""

    one: int
    two: int = field(default=2, kw_only=True)

    def __post_init__(self) -> None:
        if self.one < 0:
            raise ValueError(f"one {self.one} must be >= 0")


@quick_init
@dataclass(frozen=True, slots=True)
class Quick:
    """The same."""

    one: int
    two: int = field(default=2, kw_only=True)

    def __post_init__(self) -> None:
        if self.one < 0:
            raise ValueError(f"one {self.one} must be >= 0")


@dataclass(frozen=True, slots=True)
class Further(Quick):
    """A class below it, with a field more and an `__init__` as dataclasses have it."""

    three: int = 3


VIEW = View(buffer="source", size=2)
MADE = (
    Quick(1),
    VIEW,
    Operand(role=Role.INPUT, view=VIEW),
    Copy(id="copy", stream="compute", source=VIEW, target=VIEW, divisor=3),
    Read(id="read", stream="nvme_read", source=VIEW, target=VIEW, after=("copy",)),
)


def test_it_takes_and_refuses_the_same() -> None:
    plain, quick = inspect.signature(Plain), inspect.signature(Quick)
    assert quick == plain
    assert (Quick(1).two, Quick(one=4, two=5).two) == (2, 5)
    with pytest.raises(ValueError, match="one -1"):
        Quick(-1)
    for arguments, keywords in (((), {}), ((1, 2), {}), ((1,), {"three": 3})):
        for kind in (Plain, Quick):
            with pytest.raises(TypeError):
                kind(*arguments, **keywords)


@pytest.mark.parametrize("made", MADE)
def test_it_is_frozen_equal_to_its_copies_and_of_its_class(
    made: Quick | View | Operand | Copy,
) -> None:
    for each in fields(made):
        with pytest.raises(FrozenInstanceError):
            setattr(made, each.name, None)
        with pytest.raises(FrozenInstanceError):
            delattr(made, each.name)
    copies = [copy.copy(made), copy.deepcopy(made), pickle.loads(pickle.dumps(made)), replace(made)]
    assert {*copies, made} == {made}
    assert {type(each) for each in (*copies, made)} == {type(made)}
    assert not hasattr(made, "__dict__")


@pytest.mark.parametrize("made", MADE)
def test_a_maker_makes_the_same_and_refuses_the_same(made: Quick | View | Operand | Copy) -> None:
    found = quick_maker(type(made))(*[getattr(made, each.name) for each in fields(made)])
    assert (found, type(found), hash(found)) == (made, type(made), hash(made))
    with pytest.raises(FrozenInstanceError):
        setattr(found, fields(made)[0].name, None)
    with pytest.raises(ValueError, match="one -1"):
        quick_maker(Quick)(-1, 2)
    with pytest.raises(TypeError):
        quick_maker(Quick)(1)


@pytest.mark.parametrize("made", MADE)
def test_a_replacer_copies_as_replace_does_and_refuses_the_same(
    made: Quick | View | Operand | Copy,
) -> None:
    name = fields(made)[0].name
    found = quick_replacer(type(made), name)(made, getattr(made, name))
    assert (found, type(found), hash(found)) == (made, type(made), hash(made))
    with pytest.raises(FrozenInstanceError):
        setattr(found, name, None)
    assert quick_replacer(Quick, "two", "one")(Quick(1), 5, 4) == Quick(4, two=5)
    with pytest.raises(ValueError, match="one -1"):
        quick_replacer(Quick, "one")(Quick(1), -1)
    with pytest.raises(TypeError, match=r"Quick: takes no \['four'\]"):
        quick_replacer(Quick, "one", "four")


def test_a_class_below_it_has_its_own_fields() -> None:
    further = Further(1, three=4)
    assert (further.one, further.two, further.three, type(further)) == (1, 2, 4, Further)
    with pytest.raises(FrozenInstanceError):
        further.three = 5  # type: ignore[misc]


def test_fields_that_are_made_anew_for_each_are_refused() -> None:
    @dataclass(frozen=True, slots=True)
    class Listed:
        items: list[int] = field(default_factory=list[int])

    with pytest.raises(TypeError, match=r"Listed\.items"):
        quick_init(Listed)
