"""JSON of schedules: what goes in comes out, and what is wrong is one line with a path."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from drawn import jobs
from drawn_examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from zsim.backend.document import Document, DocumentError, decode, encode
from zsim.dtype import DType
from zsim.model.model import Model
from zsim.runtimes.registry import make_schedule
from zsim.schedule.builder import ScheduleBuilder
from zsim.schedule.layout import Layout, Piece
from zsim.schedule.mesh import Axis, Joined, Mesh, Span
from zsim.schedule.operation import Action, FreeMode, Previous, Role
from zsim.schedule.schedule import Contract, Kind, LogicalParameter, Schedule, WireBytes
from zsim.schedule.view import DIVISOR_MAX
from zsim.strategy.activations import Activations, Checkpointing
from zsim.strategy.config_table import LARGEST
from zsim.strategy.optimizer_rule import SGD, Adam, ClipNorm
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import LossScale, Train
from zsim.strategy.zero_knobs import Keep

FLOATS = st.floats(allow_nan=False)
NAMES = st.text(max_size=5)
COUNTS = st.integers(0, 2**63 - 1)
"""Beyond the whole numbers that floats hold: whole numbers in JSON are exact, up to 64 bits."""
DIVISORS = st.integers(1, DIVISOR_MAX)


@st.composite
def strategies(draw: DrawFn) -> Strategy:
    rules: list[Adam | SGD] = [SGD(learning_rate=0.1), Adam(epsilon=1e-5)]
    return Strategy(
        parallel=Parallel(data=draw(st.integers(1, LARGEST))),
        zero=Zero(
            stage=draw(st.integers(0, 3)),
            gathered_elements=draw(st.none() | st.integers(0, LARGEST)),
            keep_after_forward=draw(st.sampled_from(Keep)),
            reduce_once=draw(st.booleans()),
            host_ahead_units=draw(st.none() | st.integers(1, 5)),
        ),
        activations=Activations(checkpointing=draw(st.sampled_from(Checkpointing))),
        train=Train(
            precision=draw(st.sampled_from(Precision)),
            optimizer=draw(st.sampled_from(rules)),
            clip_norm=draw(st.none() | st.floats(1e-300, 1e300)),
            loss_scale=LossScale(initial=draw(st.floats(1, 1e38))),
        ),
    )


@st.composite
def contracts(draw: DrawFn) -> Contract:
    groups = st.sampled_from(["data", "pair", "world"])
    wire = st.builds(WireBytes, group=groups, collective=NAMES, bytes=COUNTS, scalar=st.booleans())
    parameter = st.builds(LogicalParameter, name=NAMES, elements=COUNTS)
    return Contract(
        parameters=tuple(draw(st.lists(parameter, max_size=2, unique_by=lambda each: each.name))),
        strategy=draw(st.none() | strategies()),
        loss_divisor=draw(DIVISORS),
        peak_bytes=tuple(("all", "device", size) for size in draw(st.lists(COUNTS, max_size=1))),
        wire_bytes=draw(st.none() | st.lists(wire, max_size=2).map(tuple)),
    )


@st.composite
def schedules(draw: DrawFn) -> Schedule:
    """A schedule that says one thing of everything, with drawn sizes, numbers and names."""
    data, size = draw(st.integers(1, 4)), draw(st.integers(1, 2**58))
    mesh = Mesh(axes=(Axis(name="data", size=data), Axis(name="tensor", size=2)))
    build = ScheduleBuilder(draw(NAMES), mesh)
    build.group("data", "data", where=(Span(axis="tensor", start=1, end=2),))
    pair = build.group("pair", "tensor")
    world = build.group("world", "data", "tensor")
    build.scalar("scale", draw(FLOATS))
    piece = Piece(parameter=draw(NAMES), start=0, size=size, copies=("tensor",))
    cuts = (0, *[size] * data)
    build.layout(Layout(name="cut", pieces=(piece,), elements=size, axis="data", cuts=cuts))
    own = build.buffer("own", size, layout="cut", shard="data", kind=Kind.MASTER, persistent=True)
    wide = build.buffer("wide", 2 * size, dtype=draw(st.sampled_from(DType)), produced=True)
    flag = build.buffer("flag", 1)
    setup, step = build.setup, build.step
    setup.allocate(own, flag)
    setup.fill(draw(NAMES), flag.all, draw(FLOATS), scalar="scale")
    step.allocate(wide)
    gathered = step.all_gather("gather", pair, wide[:size], wide.all)
    step.reduce_scatter("scatter", pair, wide.all, wide.own("tensor", size), after=[gathered])
    step.all_reduce("sum", world, flag.all, after=[Previous("step/sum")])
    step.send("send", pair, wide[:1], 1)
    step.receive("receive", pair, wide[1:2], -1)
    step.together("both", 2)
    step.copy("copy", wide[:1], wide[1:2], accumulate=True, divisor=draw(DIVISORS))
    step.compute(
        "clip",
        Action.CLIP,
        [(Role.INPUT, flag.all), (Role.GRADIENT, wide.all)],
        rule=ClipNorm(maximum=draw(FLOATS)),
        scalars=("scale",),
    )
    then, otherwise = step.side("then"), step.side("otherwise")
    then.set_scalar("grow", "scale", multiply=draw(FLOATS))
    otherwise.host_wait("wait", "step/sum")
    step.branch("overflow", flag.all, then, otherwise, after=["step/sum"])
    step.free(wide, mode=draw(st.sampled_from(FreeMode)), uses=["step/copy"])
    return build.schedule(draw(contracts()))


@st.composite
def runtimes(draw: DrawFn) -> Schedule:
    """A schedule that says what other runtimes need: joined axes, blocks, windows, parameters."""
    outer, inner, size = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 9))
    axes = (Axis(name="outer", size=outer), Axis(name="inner", size=inner))
    joined = Joined(name=draw(st.sampled_from(["data", "both"])), axes=("outer", "inner"))
    mesh = Mesh(axes=axes, joined=(joined,))
    build = ScheduleBuilder(draw(NAMES), mesh)
    part = size * mesh.size
    pieces = (
        Piece(parameter="one", start=0, size=draw(st.integers(0, part))),
        Piece(parameter="two", start=part, size=part),
    )
    build.layout(
        Layout(name="b", pieces=pieces, elements=2 * part, axis=joined.name, blocks=(0, part))
    )
    build.layout(Layout(name="whole", pieces=pieces, elements=2 * part))
    build.layout(Layout(name="flat", pieces=pieces, elements=2 * part, axis=joined.name))
    gathered = build.buffer("gathered", 2 * part, layout="b")
    whole = build.buffer("whole", 2 * part, layout="whole")
    own = build.buffer("own", 2 * size, layout="flat", shard=joined.name)
    step = build.step
    step.allocate(gathered, whole, own)
    step.copy("out", gathered.all, whole.all, by_parameter=True, divisor=draw(DIVISORS))
    start = draw(st.integers(0, part))
    here = whole.window("flat", part, start, origin=draw(st.integers(0, part)))
    step.copy("slices", here, own.window("flat", part, start), accumulate=draw(st.booleans()))
    step.free(gathered, whole, own)
    return build.schedule(Contract(data_axes=draw(st.permutations(["outer", "inner"]).map(tuple))))


@pytest.mark.one_commit_in(6)
@given(schedules() | runtimes(), st.integers(1, 2**63 - 1))
@settings(deadline=None)
def test_a_schedule_that_is_written_and_read_is_the_same(written: Schedule, steps: int) -> None:
    document = Document(schedule=written, steps=steps)
    text = encode(document)
    assert decode(text) == document
    assert encode(decode(text)) == text
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


@given(jobs())
@examples(30)
def test_a_generated_job_that_is_written_and_read_is_the_same(job: tuple[Model, Strategy]) -> None:
    document = Document(schedule=make_schedule(*job), model=job[0])
    assert decode(encode(document)) == document


Json = Any
"""A JSON value: its shape is what the tests change."""


def example() -> Json:
    """A document of moderate size, as plain JSON values."""
    build = ScheduleBuilder.of("sum", data=4)
    data = build.group("data", "data")
    x = build.buffer("x", 8, persistent=True)
    build.setup.allocate(x)
    build.setup.fill("x", x.all, 1.0)
    build.step.all_reduce("sum", data, x.all, after=[Previous("step/sum")])
    then, otherwise = build.step.side("then"), build.step.side("otherwise")
    then.copy("copy", x[:4], x[4:])
    build.step.branch("if", x[:1], then, otherwise, after=["step/sum"])
    strategy = Strategy(parallel=Parallel(data=4), zero=Zero(stage=2))
    return json.loads(encode(Document(schedule=build.schedule(Contract(strategy=strategy)))))


Path = list[int | str]


def paths(value: Json, path: Path) -> list[Path]:
    items: list[tuple[int | str, Json]] = []
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))
    found = [path] if path else []
    for key, inner in items:
        found += paths(inner, [*path, key])
    return found


def changed(data: Json, path: Path, change: Callable[[Json, int | str], None]) -> str:
    place = data
    for key in path[:-1]:
        place = place[key]
    change(place, path[-1])
    return json.dumps(data)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


@given(st.data())
@examples(200)
def test_a_document_with_one_value_changed_is_read_or_refused_in_one_line(
    data: st.DataObject,
) -> None:
    plain = example()
    path = data.draw(st.sampled_from(paths(plain, [])))
    value = data.draw(JSON_VALUES)
    text = changed(plain, path, lambda place, key: place.__setitem__(key, value))
    message = ""
    try:
        decode(text)
    except DocumentError as error:
        message = str(error)
    assert message.isprintable()


@given(st.data())
@settings(deadline=None)
def test_a_key_that_does_not_belong_is_named_with_its_path(data: st.DataObject) -> None:
    plain = example()
    inside = [path for path in paths(plain, []) if path[-1] in ("source", "mesh", "strategy")]
    path = data.draw(st.sampled_from(inside))
    text = changed(plain, path, lambda place, key: place[key].__setitem__("extra", 1))
    with pytest.raises(DocumentError, match=r"\.extra: unknown key; ") as caught:
        decode(text)
    where = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path)
    assert str(caught.value).startswith(f"{where[1:]}.extra: ")
