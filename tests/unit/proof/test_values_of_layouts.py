"""Parameters are kept where layouts say: pieces, cuts, buffers of several layouts, ranks."""

from typing import Any

import pytest
from faults.findings import left, named
from faults.schedules import hand, split
from runtimes_by_hand import deepspeed, fsdp2, megatron

from zsim.dtype import DType
from zsim.model.architecture import GPT
from zsim.model.gpt import gpt
from zsim.model.model import Model, Parameter, Segment, Unit, Value
from zsim.proof import check
from zsim.runtimes.registry import make_schedule
from zsim.schedule.builder import ScheduleBuilder
from zsim.schedule.layout import Layout, Piece
from zsim.schedule.mesh import Span
from zsim.schedule.operation import Action, Allocate, Compute, Operand, Role, View
from zsim.schedule.replace import replace
from zsim.schedule.schedule import Buffer, Contract, Kind, LogicalParameter, Schedule
from zsim.strategy.strategy import Parallel, Strategy, Zero


def held(
    *pieces: Piece,
    elements: int = 8,
    ranks: int = 4,
    parameters: dict[str, int] | None = None,
    cuts: tuple[int, ...] | None = None,
    initialized: bool = True,
) -> Schedule:
    """One layout that every rank holds whole."""
    build = ScheduleBuilder.of("held", data=ranks)
    build.layout(Layout(name="cut", pieces=pieces, elements=elements, axis="data", cuts=cuts))
    x = build.buffer("x", elements, kind=Kind.PARAMETER, layout="cut", persistent=True)
    build.setup.allocate(x)
    if initialized:
        build.setup.compute("initialize", Action.INITIALIZE, [(Role.PARAMETER, x.all)])
    names = {piece.parameter: piece.size for piece in pieces} if parameters is None else parameters
    return build.schedule(
        Contract(
            parameters=tuple(
                LogicalParameter(name=name, elements=size) for name, size in names.items()
            )
        )
    )


def piece(name: str, start: int, size: int) -> Piece:
    return Piece(parameter=name, start=start, size=size)


def why(schedule: Schedule) -> list[str]:
    return [each.why for each in check(schedule) if each.invariant == "values"]


def with_layout(schedule: Schedule, name: str, **fields: Any) -> Schedule:  # noqa: ANN401 (any field of a layout)
    """The schedule with other `fields` of a layout."""
    layouts = (replace(each, **fields) if each.name == name else each for each in schedule.layouts)
    return replace(schedule, layouts=tuple(layouts))


def with_state(schedule: Schedule, like: str, **fields: Any) -> Schedule:  # noqa: ANN401 (any field of a buffer)
    """The schedule with one more persistent buffer, initialized, as `like` is but for `fields`."""
    (program,) = schedule.programs
    more: Buffer = replace(program.by_name[like], **fields)
    view = View(buffer=more.name, size=more.elements)
    made = (
        Allocate(id=f"setup/{more.name}/allocate", buffer=more.name),
        Compute(
            id=f"setup/{more.name}/initialize",
            stream="compute",
            action=Action.INITIALIZE,
            operands=(Operand(role=Role.MASTER, view=view),),
        ),
    )
    program = replace(
        program,
        buffers=(*program.buffers, more),
        persistent=(*program.persistent, more.name),
        setup=(*program.setup, *made),
    )
    return replace(schedule, programs=(program,))


@pytest.mark.parametrize(
    "schedule",
    [
        held(piece("a", 0, 3), piece("b", 4, 2)),
        held(piece("b", 4, 4), piece("a", 0, 4)),
        held(piece("a", 0, 0), piece("b", 0, 8), piece("c", 3, 0), piece("d", 8, 0)),
        held(elements=0),
        held(piece("a", 0, 0), elements=0),
        held(piece("a", 0, 1), elements=4),
        held(piece("a", 0, 7), elements=7, ranks=1),
        held(piece("a", 0, 8), cuts=(0, 0, 8, 8, 8)),
    ],
    ids=[
        "padding",
        "any order",
        "empty parameters",
        "nothing",
        "an empty parameter",
        "fewer elements than ranks",
        "one rank",
        "one owner",
    ],
)
def test_parameters_that_are_kept_are_proved(schedule: Schedule) -> None:
    assert why(schedule) == []


def test_pieces_that_overlap_are_found() -> None:
    assert why(held(piece("a", 0, 4), piece("b", 3, 2))) == ["b begins at 3, inside another"]
    assert why(held(piece("a", 0, 8), piece("b", 3, 1), piece("c", 5, 1))) == [
        "b begins at 3, inside another",
        "c begins at 5, inside another",
    ]


def test_a_piece_past_the_end_is_found() -> None:
    assert why(held(piece("a", 4, 5))) == ["a ends at 9, past its 8 elements"]


def test_cuts_that_leave_elements_out_are_found() -> None:
    cut = held(piece("a", 0, 8), cuts=(0, 2, 4, 6, 7))
    assert why(cut) == ["its cuts go from 0 to 7, not from 0 to 8"]


def test_a_parameter_that_nothing_keeps_is_found() -> None:
    (found,) = why(held(piece("a", 0, 4), initialized=False))
    assert found.startswith("a: no buffer")


def test_a_parameter_that_no_layout_has_is_found() -> None:
    contract = hand().contract
    more = LogicalParameter(name="nowhere", elements=4)
    contract = replace(contract, parameters=(*contract.parameters, more))
    assert why(replace(hand(), contract=contract)) != []


def test_a_parameter_of_which_a_part_is_kept_is_found() -> None:
    (found,) = why(held(piece("a", 0, 4), parameters={"a": 5}))
    assert found.startswith("a: no buffer")


def test_a_parameter_that_the_contract_does_not_name_is_found() -> None:
    unknown = held(piece("a", 0, 4), piece("b", 4, 4), parameters={"a": 4})
    assert why(unknown) == ["holds b, which the contract does not name"]


def test_a_parameter_in_two_layouts_is_found_where_the_wrong_one_is_trained() -> None:
    schedule = hand()
    first, second, third = schedule.layouts
    twice = replace(second, pieces=first.pieces)
    assert left(replace(schedule, layouts=(first, twice, third))) == "step/layer0/update"


def test_a_rank_without_its_shard_is_found() -> None:
    schedule = hand()
    (program,) = schedule.programs
    without = replace(program, persistent=("layer0/shard", "loss/shard"))
    found = check(split(schedule, replace(schedule, programs=(without,))))
    assert {(each.invariant, each.role) for each in found} == {("lifetime", "first")}


def test_ranks_that_keep_other_layers_are_fine() -> None:
    build = ScheduleBuilder.of("pipeline", pipe=2)
    for stage in range(2):
        name = f"layer{stage}"
        build.layout(Layout(name=name, pieces=(piece(name, 0, 8),), elements=8, axis=None))
        role = build.role(name, Span(axis="pipe", start=stage, end=stage + 1))
        x = role.buffer("x", 8, kind=Kind.PARAMETER, layout=name, persistent=True)
        role.setup.allocate(x)
        role.setup.compute("initialize", Action.INITIALIZE, [(Role.PARAMETER, x.all)])
    parameters = tuple(LogicalParameter(name=f"layer{stage}", elements=8) for stage in range(2))
    assert check(build.schedule(Contract(parameters=parameters))) == ()


def test_a_contract_that_leaves_out_a_parameter_of_the_model_is_found() -> None:
    weights = tuple(Parameter(name=f"{name}.weight", shape=(6,)) for name in ("layer0", "layer2"))
    batch = Value(name="batch", elements=1, dtype=DType.INT64)
    loss = Value(name="loss", elements=1, dtype=DType.FP32)
    unit = Unit(
        name="u", parameters=weights, segments=(Segment(inputs=("batch",), outputs=(loss,)),)
    )
    found = check(hand(), Model(name="m", units=(unit,), batch=batch))
    assert {(each.invariant, each.operation) for each in found} == {("values", "contract")}
    assert [each.why.partition(":")[0] for each in found] == [
        "layer1.weight",
        "layer2.weight",
        "loss.weight",
    ]


def test_masters_alone_may_keep_the_parameters() -> None:
    """The sharded parameter of FSDP2 in fp32 may be called a master as well."""
    (program,) = fsdp2().programs
    buffers = tuple(
        replace(each, kind=Kind.MASTER) if each.name == "shard" else each
        for each in program.buffers
    )
    assert check(replace(fsdp2(), programs=(replace(program, buffers=buffers),))) == ()


def test_a_layout_that_has_a_part_of_a_parameter_is_found() -> None:
    pieces = (Piece(parameter="w", start=0, size=4), Piece(parameter="b", start=5, size=3))
    assert named(with_layout(fsdp2(), "alone", pieces=pieces))[0] == ("values", "step/reduce")


def test_a_layout_that_has_something_else_beside_parameters_is_found() -> None:
    pieces = (Piece(parameter="w", start=0, size=5), Piece(parameter="x", start=5, size=3))
    assert named(with_layout(fsdp2(), "alone", pieces=pieces)) == [("values", "alone")]


def test_a_layout_of_something_else_is_nobody_s_business() -> None:
    more = Layout(name="x", pieces=(Piece(parameter="x", start=0, size=3),), elements=4)
    schedule = deepspeed()
    assert check(replace(schedule, layouts=(*schedule.layouts, more))) == ()


def test_a_parameter_that_lies_in_two_blocks_is_found() -> None:
    assert named(with_layout(fsdp2(), "cut", blocks=(0, 4))) == [("values", "cut")]


@pytest.mark.parametrize("name", ["head.ln.weight", "block0.qkv.weight"], ids=["copied", "cut"])
def test_a_layout_that_says_otherwise_which_ranks_hold_copies_is_found(name: str) -> None:
    """Without clipping no norm counts copies: ranks would begin with different values, or alike."""
    shape = GPT(layers=1, hidden_size=2, attention_heads=2, sequence_length=2, vocab_size=3)
    model = gpt(shape, micro_batch_size=1, tensor=2)
    made = make_schedule(model, Strategy(parallel=Parallel(data=1, tensor=2), zero=Zero(stage=0)))
    assert check(made, model) == ()
    (layout,) = (each for each in made.layouts if any(p.parameter == name for p in each.pieces))
    pieces = tuple(
        replace(each, copies=() if each.copies else ("tensor",)) if each.parameter == name else each
        for each in layout.pieces
    )
    (finding,) = check(with_layout(made, layout.name, pieces=pieces), model)
    assert finding.invariant == "values"
    assert name in finding.why


def test_masters_cut_otherwise_than_the_parameters_may_have_copies_that_nobody_reads() -> None:
    """Megatron: the parameters lie whole, one after the other, the masters are cut by bucket."""
    assert check(megatron()) == ()
    assert why(with_state(megatron(), "master", name="again")) == []


def test_a_copy_of_a_master_that_goes_stale_is_found_where_it_is_read() -> None:
    stale = with_state(megatron(), "master", name="again")
    (program,) = stale.programs
    put: Any = program.by_id["step/put"]
    wrong = replace(put, source=replace(put.source, buffer="again"))
    step = tuple(wrong if each.id == put.id else each for each in program.step)
    assert left(replace(stale, programs=(replace(program, step=step),))) == "step/gather_b"


def test_masters_that_leave_a_parameter_out_are_found() -> None:
    schedule = megatron()
    w = Piece(parameter="w", start=0, size=5)
    layout = Layout(name="w_alone", pieces=(w,), elements=12, axis="data", blocks=(0, 8))
    (program,) = schedule.programs
    buffers = tuple(
        replace(each, layout="w_alone") if each.name == "master" else each
        for each in program.buffers
    )
    faulty = replace(
        schedule,
        layouts=(*schedule.layouts, layout),
        programs=(replace(program, buffers=buffers),),
    )
    assert left(faulty) == "step/gather_b"


def test_a_rank_without_its_shard_of_a_joined_axis_is_found() -> None:
    schedule = fsdp2()
    (program,) = schedule.programs
    other = replace(schedule, programs=(replace(program, persistent=()),))
    found = check(split(schedule, other, axis="inner"))
    assert {(each.invariant, each.role) for each in found} == {("lifetime", "first")}
