from dataclasses import replace

from mutation import hand, named, split

from zsim.builder import ScheduleBuilder
from zsim.check import Finding, check
from zsim.dtype import DType
from zsim.layout import Layout, Piece
from zsim.mesh import Span
from zsim.model import Model, Parameter, Segment, Unit, Value
from zsim.operation import Action, Role
from zsim.schedule import Contract, Kind, LogicalParameter, Schedule


def partition(schedule: Schedule, model: Model | None = None) -> list[Finding]:
    return [each for each in check(schedule, model) if each.invariant == "partition"]


def held(
    *pieces: Piece,
    elements: int = 8,
    ranks: int = 4,
    parameters: dict[str, int] | None = None,
    kinds: tuple[Kind, ...] = (Kind.PARAMETER,),
    cuts: tuple[int, ...] | None = None,
) -> Schedule:
    """One layout that every rank holds whole, in buffers of the given kinds."""
    build = ScheduleBuilder.of("held", data=ranks)
    build.layout(Layout(name="cut", pieces=pieces, elements=elements, axis="data", cuts=cuts))
    for number, kind in enumerate(kinds):
        x = build.buffer(f"{kind}{number}", elements, kind=kind, layout="cut", persistent=True)
        build.setup.allocate(x)
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
    return [each.why for each in partition(schedule)]


def test_padding_between_and_after_pieces_is_allowed() -> None:
    assert why(held(piece("a", 0, 3), piece("b", 4, 2))) == []


def test_pieces_may_be_listed_in_any_order() -> None:
    assert why(held(piece("b", 4, 2), piece("a", 0, 4))) == []


def test_empty_parameters_lie_anywhere() -> None:
    assert why(held(piece("a", 0, 0), piece("b", 0, 8), piece("c", 3, 0), piece("d", 8, 0))) == []


def test_nothing_at_all_is_partitioned() -> None:
    assert why(held(elements=0)) == []
    assert why(held(piece("a", 0, 0), elements=0)) == []


def test_fewer_elements_than_ranks_and_one_rank_are_fine() -> None:
    assert why(held(piece("a", 0, 1), elements=4)) == []
    assert why(held(piece("a", 0, 7), elements=7, ranks=1)) == []


def test_pieces_that_overlap_are_found() -> None:
    assert why(held(piece("a", 0, 4), piece("b", 3, 2))) == ["b overlaps a"]


def test_a_piece_inside_another_is_found() -> None:
    assert why(held(piece("a", 0, 8), piece("b", 3, 1), piece("c", 5, 1))) == [
        "b overlaps a",
        "c overlaps a",
    ]


def test_a_piece_past_the_end_is_found() -> None:
    assert why(held(piece("a", 4, 5))) == ["a ends at 9, past its 8 elements"]


def test_cuts_that_leave_elements_out_are_found() -> None:
    cut = held(piece("a", 0, 8), cuts=(0, 2, 4, 6, 7))
    assert why(cut) == ["its cuts go from 0 to 7, not from 0 to 8"]
    assert why(held(piece("a", 0, 8), cuts=(0, 0, 8, 8, 8))) == []


def test_a_parameter_that_nothing_holds_is_found() -> None:
    missing = held(piece("a", 0, 4), parameters={"a": 4, "b": 4})
    assert why(missing) == ["lies in no parameter layout, and must lie in exactly one"]


def test_a_parameter_of_which_a_part_is_held_is_found() -> None:
    assert why(held(piece("a", 0, 4), parameters={"a": 5})) == ["has 5 elements, cut holds 4"]


def test_a_parameter_in_pieces_counts_as_their_sum() -> None:
    assert why(held(piece("a", 0, 3), piece("a", 5, 3), parameters={"a": 6})) == []


def test_a_parameter_that_the_contract_does_not_name_is_found() -> None:
    unknown = held(piece("a", 0, 4), piece("b", 4, 4), parameters={"a": 4})
    assert why(unknown) == ["holds b, which the contract does not name"]


def test_a_parameter_in_two_layouts_is_found() -> None:
    schedule = hand()
    first, second, third = schedule.layouts
    twice = replace(second, pieces=first.pieces)
    found = partition(replace(schedule, layouts=(first, twice, third)))
    assert [(each.operation, each.why) for each in found] == [
        ("layer0.weight", "lies in layer0 and layer1, and must lie in exactly one"),
        ("layer1.weight", "lies in no parameter layout, and must lie in exactly one"),
    ]


def test_two_buffers_of_the_same_parameters_are_found() -> None:
    (found,) = partition(held(piece("a", 0, 8), kinds=(Kind.PARAMETER, Kind.PARAMETER)))
    assert found.why == "is held by 2 persistent buffers of kind parameter, not 1"
    assert found.witness == ("parameter0", "parameter1")


def test_two_masters_are_found_and_two_moments_are_not() -> None:
    kinds = (Kind.PARAMETER, Kind.MOMENT, Kind.MOMENT)
    assert why(held(piece("a", 0, 8), kinds=kinds)) == []
    kinds = (Kind.PARAMETER, Kind.MASTER, Kind.MASTER)
    assert why(held(piece("a", 0, 8), kinds=kinds)) == [
        "is held by 2 persistent buffers of kind master, not 1"
    ]


def test_a_layout_without_the_moments_of_the_others_is_found() -> None:
    schedule = hand()
    (program,) = schedule.programs
    shard = program.by_name["layer0/shard"]
    moment = replace(shard, name="moment", kind=Kind.MOMENT)
    program = replace(
        program, buffers=(*program.buffers, moment), persistent=(*program.persistent, "moment")
    )
    found = partition(replace(schedule, programs=(program,)))
    assert [each.operation for each in found] == ["layer1", "loss"]


def test_a_rank_without_its_shard_is_found() -> None:
    schedule = hand()
    (program,) = schedule.programs
    without = replace(program, persistent=("layer0/shard", "loss/shard"))
    found = partition(split(schedule, replace(schedule, programs=(without,))))
    assert [(each.role, each.operation) for each in found] == [("first", "layer1")]


def test_ranks_that_hold_other_layers_are_fine() -> None:
    build = ScheduleBuilder.of("pipeline", pipe=2)
    for stage in range(2):
        name = f"layer{stage}"
        build.layout(Layout(name=name, pieces=(piece(name, 0, 8),), elements=8, axis=None))
        role = build.role(name, Span(axis="pipe", start=stage, end=stage + 1))
        x = role.buffer("x", 8, kind=Kind.PARAMETER, layout=name, persistent=True)
        role.setup.allocate(x)
    parameters = tuple(LogicalParameter(name=f"layer{stage}", elements=8) for stage in range(2))
    assert check(build.schedule(Contract(parameters=parameters))) == ()


def test_what_is_initialized_needs_a_layout() -> None:
    build = ScheduleBuilder.of("bare", data=1)
    x = build.buffer("x", 8, persistent=True)
    build.setup.allocate(x)
    build.setup.compute("initialize", Action.INITIALIZE, [(Role.PARAMETER, x.all)])
    assert named(build.schedule()) == [("partition", "setup/initialize")]


def test_a_contract_that_leaves_out_a_parameter_of_the_model_is_found() -> None:
    weights = tuple(Parameter(name=f"{name}.weight", shape=(6,)) for name in ("layer0", "layer2"))
    batch = Value(name="batch", elements=1, dtype=DType.INT64)
    loss = Value(name="loss", elements=1, dtype=DType.FP32)
    unit = Unit(
        name="u", parameters=weights, segments=(Segment(inputs=("batch",), outputs=(loss,)),)
    )
    found = partition(hand(), Model(name="m", units=(unit,), batch=batch))
    assert [each.why for each in found] == [
        "the contract has 6 elements of layer1.weight, the model nothing",
        "the contract has nothing of layer2.weight, the model 6 elements",
        "the contract has 6 elements of loss.weight, the model nothing",
    ]
