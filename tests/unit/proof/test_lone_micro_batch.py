"""A micro-batch that does anything but what is allowed is never left out."""

import pytest

from zsim.dtype import DType
from zsim.proof.execution.lone_micro_batch import need_commuting, need_lone
from zsim.proof.execution.repetition import IrregularError
from zsim.schedule.layout import Layout, Piece
from zsim.schedule.operation import (
    Action,
    Allocate,
    AllReduce,
    Compute,
    Copy,
    Fill,
    Free,
    Operand,
    Operation,
    Read,
    Receive,
    Reduction,
    Role,
    Send,
    SetScalar,
    View,
    Write,
)
from zsim.strategy.optimizer_rule import Adam

SIZE = 4
ALIKE, APART = "alike", "apart"
"""Groups whose members run one program, and several."""


def view(buffer: str, size: int = SIZE, start: int = 0) -> View:
    return View(buffer=buffer, size=size, start=start)


def compute(action: Action, *operands: tuple[Role, str], scalars: tuple[str, ...] = ()) -> Compute:
    return Compute(
        id=f"{action} {operands}",
        stream="compute",
        action=action,
        operands=tuple(Operand(role=role, view=view(name)) for role, name in operands),
        scalars=scalars,
    )


def copy(source: str, target: str, *, accumulate: bool = False) -> Copy:
    return Copy(
        id=f"{source} to {target}",
        stream="compute",
        source=view(source),
        target=view(target),
        accumulate=accumulate,
    )


def reduced(source: str, target: str, group: str, reduction: Reduction) -> AllReduce:
    return AllReduce(
        id=f"reduce {source}",
        stream="communication",
        group=group,
        source=view(source),
        target=view(target),
        wire=DType.BF16,
        accumulate=DType.FP32,
        reduction=reduction,
    )


def receive(target: str) -> Receive:
    return Receive(
        id="receive", stream="p2p", group=ALIKE, offset=1, target=view(target), wire=DType.BF16
    )


def fill(target: str) -> Fill:
    return Fill(id="fill", stream="compute", target=view(target), value=1.0)


def step(*inside: Operation) -> list[Operation]:
    """A micro-batch that adds a gradient to `sum`, with more before it does."""
    own = ("batch", "hidden", "gradient", "other")
    return [
        *(Allocate(id=f"take {name}", buffer=name) for name in own),
        compute(Action.LOAD, (Role.OUTPUT, "batch")),
        compute(
            Action.FORWARD,
            (Role.INPUT, "batch"),
            (Role.PARAMETER, "weight"),
            (Role.OUTPUT, "hidden"),
        ),
        Send(
            id="send", stream="p2p", group=ALIKE, offset=1, source=view("hidden"), wire=DType.BF16
        ),
        compute(
            Action.BACKWARD,
            (Role.INPUT, "batch"),
            (Role.PARAMETER, "weight"),
            (Role.OUTPUT_GRADIENT, "hidden"),
            (Role.GRADIENT, "gradient"),
        ),
        *inside,
        copy("gradient", "sum", accumulate=True),
        *(Free(id=f"give {name}", buffer=name) for name in own),
    ]


def is_alike(group: str) -> bool:
    return group == ALIKE


SOME = (Allocate(id="take", buffer="more"), Free(id="give", buffer="more"))
ALLOWED: dict[str, tuple[Operation, ...]] = {
    "nothing more": (),
    "memory of its own": (*SOME, *SOME),
    "a message": (receive("other"),),
    "a number in its own memory": (fill("other"),),
    "a parameter in its own memory": (copy("weight", "other"),),
    "gradients that are copied": (copy("gradient", "other"), copy("other", "sum", accumulate=True)),
    "gradients that are reduced": (reduced("gradient", "gradient", ALIKE, Reduction.SUM),),
    "memory that is used once more": (
        fill("other"),
        Free(id="give other", buffer="other"),
        Allocate(id="take other again", buffer="other"),
        copy("gradient", "other"),
        copy("other", "sum", accumulate=True),
    ),
}
REFUSED: dict[str, tuple[Operation, ...]] = {
    "memory that it keeps": SOME[:1],
    "memory that it takes twice": (SOME[0], *SOME),
    "memory that others took": SOME[1:],
    "a number of the host": (SetScalar(id="count", scalar="step", add=1.0),),
    "a file that is read": (
        Read(id="read", stream="nvme", source=view("weight"), target=view("other")),
    ),
    "a file that is written": (
        Write(id="write", stream="nvme", source=view("gradient"), target=view("other")),
    ),
    "another computation": (compute(Action.AMAX, (Role.INPUT, "hidden"), (Role.OUTPUT, "other")),),
    "an update": (
        Compute(
            id="update",
            stream="compute",
            action=Action.UPDATE,
            operands=(Operand(role=Role.GRADIENT, view=view("gradient")),),
            rule=Adam(),
        ),
    ),
    "a segment that reads the host": (
        compute(Action.FORWARD, (Role.INPUT, "batch"), (Role.OUTPUT, "hidden"), scalars=("step",)),
    ),
    "a sum that is set": (copy("gradient", "sum"),),
    "a number that is written elsewhere": (fill("sum"),),
    "a message that is written elsewhere": (receive("sum"),),
    "an output that is written elsewhere": (
        compute(Action.FORWARD, (Role.INPUT, "batch"), (Role.OUTPUT, "sum")),
    ),
    "a collective that is written elsewhere": (reduced("gradient", "sum", ALIKE, Reduction.SUM),),
    "a parameter in the sum": (copy("weight", "sum", accumulate=True),),
    "a number in the sum": (fill("other"), copy("other", "sum", accumulate=True)),
    "a message in the sum": (receive("other"), copy("other", "sum", accumulate=True)),
    "an output in the sum": (copy("hidden", "sum", accumulate=True),),
    "a number in the gradient": (fill("gradient"),),
    "a parameter added to the gradient": (copy("weight", "gradient", accumulate=True),),
    "the largest gradient": (reduced("gradient", "gradient", ALIKE, Reduction.MAX),),
    "what other programs bring": (reduced("gradient", "gradient", APART, Reduction.SUM),),
}


@pytest.mark.parametrize("name", ALLOWED)
def test_a_micro_batch_of_its_own_may_be_left_out(name: str) -> None:
    need_lone(step(*ALLOWED[name]), is_alike)


@pytest.mark.parametrize("name", REFUSED)
def test_one_that_does_anything_else_stays(name: str) -> None:
    with pytest.raises(IrregularError):
        need_lone(step(*REFUSED[name]), is_alike)


PIECES = (Piece(parameter="one", start=0, size=3), Piece(parameter="other", start=4, size=2))
FLAT = Layout(name="flat", pieces=PIECES, elements=8)
CUT = Layout(name="cut", pieces=PIECES, elements=8, axis="data", blocks=(0, 4))


def added(start: int, size: int, *, by_parameter: bool = False) -> Copy:
    return Copy(
        id=f"add {start}",
        stream="compute",
        source=view("gradient", size),
        target=view("sum", size, start),
        accumulate=True,
        by_parameter=by_parameter,
    )


def test_sums_of_parameters_come_in_any_order() -> None:
    by_parameter = added(0, 8, by_parameter=True)
    need_commuting([by_parameter, added(0, 3), added(4, 1), by_parameter], FLAT)
    need_commuting([added(0, 8), added(3, 1)], FLAT)  # nothing sets padding to zero
    need_commuting([added(0, 8), added(3, 1)], None)


@pytest.mark.parametrize(("start", "size"), [(0, 4), (3, 1), (2, 3), (5, 2)])
def test_a_sum_in_padding_comes_before_it_is_set_to_zero_or_after(start: int, size: int) -> None:
    with pytest.raises(IrregularError):
        need_commuting([added(start, size), added(0, 8, by_parameter=True)], FLAT)


@pytest.mark.parametrize("layout", [None, CUT])
def test_padding_that_is_not_known_may_be_anywhere(layout: Layout | None) -> None:
    with pytest.raises(IrregularError):
        need_commuting([added(0, 3), added(0, 8, by_parameter=True)], layout)
