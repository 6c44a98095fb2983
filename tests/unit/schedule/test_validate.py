"""Each rule of well-formedness refuses a schedule with one fault, in one line that names it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import pytest

from zsim.dtype import DType
from zsim.schedule.builder import COMMUNICATION, COMPUTE, OperationList, ScheduleBuilder
from zsim.schedule.layout import Layout, Piece
from zsim.schedule.mesh import Group, Span
from zsim.schedule.operation import (
    Action,
    AllGather,
    Compute,
    Copy,
    Fill,
    Free,
    Operand,
    OperationError,
    Previous,
    Role,
    Send,
    SetScalar,
    Together,
    View,
)
from zsim.schedule.replace import replace
from zsim.schedule.schedule import (
    Contract,
    Kind,
    LogicalParameter,
    Schedule,
    ScheduleError,
    WireBytes,
)
from zsim.strategy.optimizer_rule import SGD, Adam, Optimizer

CUT = Layout(name="cut", pieces=(Piece(parameter="w", start=0, size=7),), elements=8, axis="data")
Fault = Callable[[ScheduleBuilder], object]


def start() -> ScheduleBuilder:
    """Four ranks, a group over them, a buffer `x` of 8, a number `n`, a shard of a layout."""
    build = ScheduleBuilder.of("small", data=4)
    build.group("data", "data")
    build.layout(CUT)
    build.buffer("x", 8, persistent=True)
    build.buffer("n", 1)
    build.buffer("shard", 2, layout="cut", shard="data")
    build.buffer("half", 8, dtype=DType.FP16)
    build.scalar("step", 0.0)
    build.setup.fill("zero", X, 0.0)
    return build


X, N, SHARD = View(buffer="x", size=8), View(buffer="n", size=1), View(buffer="shard", size=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class OfMatrices(SGD):
    """A rule that needs whole matrices, such as Muon's."""

    element_wise: ClassVar[bool] = False


def update(*operands: tuple[Role, View], rule: Optimizer | None = None) -> Fault:
    rule = rule or SGD()
    return lambda build: build.step.compute("u", Action.UPDATE, operands, rule=rule)


def fills(**change: object) -> Fault:
    def fault(build: ScheduleBuilder) -> None:
        build.step.add(replace(Fill(id="f", stream=COMPUTE, target=X, value=0.0), **change))

    return fault


def computes(*operands: tuple[Role, View] | Operand, action: Action = Action.FORWARD) -> Fault:
    return lambda build: build.step.compute("c", action, operands)


def buffers(**fields: object) -> Fault:
    return lambda build: build.buffer("new", **({"elements": 8} | fields))  # type: ignore[arg-type]  # fields by name, drawn below


def after(edge: str | Previous, *, setup: bool = False) -> Fault:
    return lambda build: (build.setup if setup else build.step).fill("f", X, 0.0, after=[edge])


def gathers(source: View, target: View, group: str = "data") -> Fault:
    return lambda build: build.step.all_gather("g", group, source, target)


FAULTS: list[tuple[str, Fault]] = [
    ("group data: the name is used twice", lambda build: build.group("data", "data")),
    ("layout cut: the name is used twice", lambda build: build.layout(CUT)),
    ("stream compute: the name is used twice", lambda build: build.stream(COMPUTE)),
    ("scalar step: the name is used twice", lambda build: build.scalar("step", 1.0)),
    ("pool device: the name is used twice", lambda build: build.pools.append(build.pools[0])),
    ("group g: no axis 'pipe'", lambda build: build.group("g", "pipe")),
    ("group g: axis data: the name is used twice", lambda build: build.group("g", "data", "data")),
    (
        "group g: span of data: end 5 is past",
        lambda build: build.group("g", "data", where=(Span(axis="data", start=0, end=5),)),
    ),
    (
        "layout odd: layout odd: 6 elements",
        lambda build: build.layout(Layout(name="odd", pieces=(), elements=6, axis="data")),
    ),
    (
        "layout odd: no axis 'pipe'",
        lambda build: build.layout(Layout(name="odd", pieces=(), elements=6, axis="pipe")),
    ),
    ("buffer new: no pool 'disk'", buffers(pool="disk")),
    ("buffer new: no stream 'disk'", buffers(home="disk")),
    ("buffer new: no layout 'none'", buffers(layout="none")),
    ("buffer new: shard without a layout", buffers(shard="data")),
    (
        "buffer new: shard 'tensor', but the layout is cut along 'data'",
        buffers(layout="cut", shard="tensor"),
    ),
    ("buffer new: 7 elements, its layout has 8", buffers(elements=7, layout="cut")),
    ("buffer new: 9 elements, its layout has 8", buffers(elements=9, layout="cut")),
    (
        "buffer new: 7 elements, its layout has 8",
        buffers(elements=7, layout="cut", kind=Kind.COMMUNICATION),
    ),
    (
        "buffer new: 3 elements, its layout has 2",
        buffers(elements=3, layout="cut", shard="data", kind=Kind.COMMUNICATION),
    ),
    ("buffer new: 8 elements, its layout has 2", buffers(layout="cut", shard="data")),
    ("new: elements -1 must be >= 0", buffers(elements=-1)),
    ("persistent x: the name is used twice", lambda build: build.persistent.append("x")),
    ("persistent: no buffer 'y'", lambda build: build.persistent.append("y")),
    ("id step/f is used twice", lambda build: [build.step.fill("f", X, 0.0) for _ in "ab"]),
    ("f: no buffer 'y'", fills(target=View(buffer="y", size=1))),
    ("f: view of x ends at 9, past 8", fills(target=View(buffer="x", start=1, size=8))),
    ("f: view of x ends at 12, past 8", fills(target=View(buffer="x", size=3, axis="data"))),
    ("f: no axis 'pipe'", fills(target=View(buffer="x", size=1, axis="pipe"))),
    ("f: no layout 'none'", fills(target=View(buffer="x", size=1, layout="none"))),
    ("f: x is no shard of layout cut", fills(target=View(buffer="x", size=1, layout="cut"))),
    ("f: the window leaves layout", fills(target=View(buffer="shard", size=9, layout="cut"))),
    ("f: no scalar 'loss'", fills(scalar="loss")),
    ("f: no stream 'disk'", fills(stream="disk")),
    ("f: after 'step/none', which is no operation", after("step/none")),
    ("f: after 'setup/zero', which is in setup", after("setup/zero")),
    ("f: setup has no previous 'setup/zero'", after(Previous("setup/zero"), setup=True)),
    ("free: no buffer 'y'", lambda build: build.step.add(Free(id="free", buffer="y"))),
    ("copies 2 elements to 8", lambda build: build.step.copy("c", SHARD, X)),
    ("c: forward has no operand moment; it has input,", computes((Role.MOMENT, X))),
    ("c: no axis 'pipe'", computes(Operand(role=Role.OUTPUT, view=X, partial=("pipe",)))),
    (
        "c: no scalar 'loss'",
        lambda build: build.step.compute("c", Action.LOAD, [(Role.OUTPUT, X)], scalars=["loss"]),
    ),
    (
        "c: one output of 1 element is needed, got [8]",
        computes((Role.OUTPUT, X), action=Action.NORM),
    ),
    (
        "c: one input of 1 element is needed, got []",
        computes((Role.GRADIENT, X), action=Action.CLIP),
    ),
    (
        "c: rule None must be ClipNorm",
        computes((Role.INPUT, N), (Role.GRADIENT, X), action=Action.CLIP),
    ),
    (
        "c: rule None must be Adam, SGD, Adam8bit or PagedAdam8bit",
        computes((Role.GRADIENT, X), action=Action.UPDATE),
    ),
    (
        "u: rule OfMatrices needs whole tensors, and updates are of elements",
        update((Role.GRADIENT, X), (Role.MASTER, X), rule=OfMatrices()),
    ),
    ("u: 0 moments, 2 needed", update((Role.GRADIENT, X), (Role.MASTER, X), rule=Adam())),
    ("u: one operand, master or parameter, is updated", update((Role.GRADIENT, X))),
    ("u: one gradient operand is needed", update((Role.MASTER, X))),
    (
        "u: operands of one size are needed, they have [1, 8]",
        update((Role.GRADIENT, X), (Role.PARAMETER, N)),
    ),
    ("g: no group 'none'", gathers(SHARD, X, "none")),
    ("g: x has 8 elements, not 4", gathers(N, X)),
    ("g: wire dtype fp32, but half is fp16", gathers(SHARD, View(buffer="half", size=8))),
    ("g: a collective needs equal sizes", gathers(View(buffer="shard", size=2, layout="cut"), X)),
    ("r: x has 8 elements, not 4", lambda build: build.step.reduce_scatter("r", "data", X, N)),
    ("r: n has 1 elements, not 8", lambda build: build.step.all_reduce("r", "data", X, N)),
    ("b: root 4 is outside 0 to 3", lambda build: build.step.broadcast("b", "data", X, root=4)),
    (
        "b: a branch reads 1 element, not 8",
        lambda build: build.step.branch(
            "b", X, build.step.side("a"), build.step.side("b"), after=[]
        ),
    ),
    ("s: no scalar 'loss'", lambda build: build.step.set_scalar("s", "loss")),
    (
        "s: every 0 must be at least 1",
        lambda build: build.step.add(SetScalar(id="s", scalar="step", counter="step", every=0)),
    ),
    (
        "s: no scalar 'loss'",
        lambda build: build.step.add(SetScalar(id="s", scalar="step", counter="loss")),
    ),
    (
        "s: minimum 2.0 is above maximum 1.0",
        lambda build: build.step.add(SetScalar(id="s", scalar="step", minimum=2.0, maximum=1.0)),
    ),
]


@pytest.mark.parametrize(("message", "fault"), FAULTS, ids=[message for message, _ in FAULTS])
def test_a_schedule_with_one_fault_is_refused_where_it_is(message: str, fault: Fault) -> None:
    def with_fault() -> Schedule:
        build = start()
        fault(build)
        return build.schedule()

    start().schedule()
    with pytest.raises(ScheduleError) as refusal:
        with_fault()
    assert message in str(refusal.value)


def test_an_edge_to_an_action_of_the_host_is_refused() -> None:
    build = start()
    build.step.add(Free(id="free", buffer="n"))
    build.step.host_wait("wait", "free")
    with pytest.raises(ScheduleError, match="after 'free', which is on no stream"):
        build.schedule()


def test_roles_that_share_ranks_are_refused() -> None:
    build = ScheduleBuilder.of("roles", data=4)
    build.role("one", Span(axis="data", start=0, end=3))
    build.role("other", Span(axis="data", start=2, end=4))
    with pytest.raises(ScheduleError, match="role other: shares ranks with role one"):
        build.schedule()


def test_ranks_without_a_role_are_refused() -> None:
    build = ScheduleBuilder.of("roles", data=4)
    build.role("one", Span(axis="data", start=0, end=3))
    with pytest.raises(ScheduleError, match="cover 3 ranks of 4"):
        build.schedule()


def test_a_role_outside_the_mesh_is_refused() -> None:
    build = ScheduleBuilder.of("roles", data=4)
    build.role("one", Span(axis="data", start=0, end=5))
    with pytest.raises(ScheduleError, match="role one: span of data"):
        build.schedule()


def test_operations_for_all_ranks_beside_roles_are_refused() -> None:
    build = start()
    build.role("one", Span(axis="data", start=0, end=4))
    with pytest.raises(ScheduleError, match="role all: give its buffers and operations"):
        build.schedule()


def test_a_role_without_a_program_is_refused() -> None:
    schedule = start().schedule()
    with pytest.raises(ScheduleError, match="one for each role is needed"):
        replace(schedule, programs=())


@pytest.mark.parametrize(
    ("contract", "message"),
    [
        (Contract(peak_bytes=(("all", "disk", 1),)), "no role 'all' with pool 'disk'"),
        (Contract(peak_bytes=(("all", "device", 1),) * 2), "all/device: the name is used twice"),
        (
            Contract(wire_bytes=(WireBytes(group="pipe", collective="send", bytes=1),)),
            "no group 'pipe'",
        ),
        (Contract(parameters=(LogicalParameter(name="w", elements=1),) * 2), "w: the name is used"),
    ],
)
def test_a_contract_about_what_is_not_there_is_refused(contract: Contract, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        start().schedule(contract)


def send(name: str, stream: str = COMMUNICATION, group: str = "data") -> Send:
    return Send(id=name, stream=stream, group=group, offset=1, source=N, wire=DType.FP32)


def test_a_member_of_a_together_needs_an_id_of_its_own() -> None:
    build = start()
    build.step.add(Together(id="both", stream=COMMUNICATION, members=(send("a"), send("a"))))
    with pytest.raises(ScheduleError, match="id a is used twice"):
        build.schedule()


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ((), "at least one member"),
        ((send("a"), send("b", group="other")), "share one group"),
        ((send("a", stream=COMPUTE),), "is on its stream"),
    ],
)
def test_a_together_of_unlike_members_is_refused(members: tuple[Send, ...], message: str) -> None:
    with pytest.raises(OperationError, match=message):
        Together(id="both", stream=COMMUNICATION, members=members)


def test_a_divisor_below_one_is_refused() -> None:
    with pytest.raises(OperationError, match="divisor 0"):
        Copy(id="c", stream=COMPUTE, source=X, target=X, divisor=0)


def test_a_view_has_an_axis_or_a_layout() -> None:
    with pytest.raises(OperationError, match="an axis or a layout, not both"):
        View(buffer="x", size=1, axis="data", layout="cut")
    with pytest.raises(OperationError, match="must be >= 0"):
        View(buffer="x", size=-1)


def test_a_view_with_an_axis_moves_with_the_coordinate() -> None:
    schedule = start().schedule()
    own = View(buffer="x", start=1, size=2, axis="data")
    assert schedule.extent(own, {"data": 3}) == (7, 2)


def test_a_window_on_uneven_cuts_follows_the_segment() -> None:
    cuts = Layout(name="cuts", pieces=(), elements=8, axis="data", cuts=(0, 5, 5, 6, 8))
    build = ScheduleBuilder.of("uneven", data=4)
    build.layout(cuts)
    build.buffer("part", 5, layout="cuts", shard="data")
    schedule = build.schedule()
    window = View(buffer="part", start=4, size=3, layout="cuts")
    extents = [schedule.extent(window, {"data": index}) for index in range(4)]
    assert extents == [(4, 1), (0, 0), (0, 1), (0, 1)]


def test_a_rank_finds_its_role_and_program() -> None:
    build = ScheduleBuilder.of("roles", data=4)
    build.role("first", Span(axis="data", start=0, end=1))
    build.role("rest", Span(axis="data", start=1, end=4))
    schedule = build.schedule()
    assert [schedule.program_of(rank).role for rank in range(4)] == ["first", *["rest"] * 3]


def test_both_sides_of_a_branch_may_be_built() -> None:
    build = start()
    then, otherwise = build.step.side("yes"), build.step.side("no")
    assert isinstance(then, OperationList)
    name = then.fill("f", X, 1.0)
    build.step.branch("b", N, then, otherwise, after=[])
    assert build.schedule().programs[0].by_id[name].id == "step/yes/f"


def test_a_group_is_found_by_name() -> None:
    schedule = start().schedule()
    assert schedule.group_by_name["data"] == Group(name="data", axes=("data",))


def test_an_operation_made_elsewhere_may_be_added() -> None:
    build = start()
    gather = AllGather(
        id="g", stream=COMMUNICATION, group="data", source=SHARD, target=X, wire=DType.FP32
    )
    load = Compute(id="l", stream=COMPUTE, action=Action.LOAD, operands=())
    assert build.step.add(gather) == "g"
    assert build.step.add(load) == "l"
    build.schedule()
