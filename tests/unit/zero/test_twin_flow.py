"""Twin-Flow: the first buckets are updated on the device, the others on the host."""

import re

import pytest
from drawn_examples import examples
from hypothesis import given
from hypothesis import strategies as st

from zsim.closed_form.offloaded import host_bytes
from zsim.closed_form.zero_stages import kept_back
from zsim.config_error import ConfigError
from zsim.dtype import DType
from zsim.model.architecture import GPT
from zsim.model.gpt import gpt
from zsim.model.model import BATCH, Model, ModelError, Parameter, Segment, Unit, Value
from zsim.proof import check
from zsim.runtimes.registry import make_schedule
from zsim.schedule.operation import Action, Compute, walk
from zsim.schedule.schedule import Kind, Schedule
from zsim.strategy.offload import MemoryTier, Offload
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import Train
from zsim.strategy.zero_knobs import BUCKET_ELEMENTS, FusedBuffers

SHAPE = GPT(layers=3, hidden_size=8, attention_heads=2, sequence_length=4, vocab_size=16)


def strategy(share: float, stage: int = 3, precision: Precision = Precision.BF16) -> Strategy:
    """Two ranks whose host updates all but a share; buckets of one block and smaller ones."""
    return Strategy(
        parallel=Parallel(data=2),
        zero=Zero(stage=stage, bucket_elements=1000),
        offload=Offload(optimizer=MemoryTier.HOST, device_share=share),
        train=Train(precision=precision, clip_norm=1.0),
    )


def model_of(one: Strategy) -> Model:
    return gpt(SHAPE, micro_batch_size=1, precision=one.train.precision)


def made(one: Strategy) -> Schedule:
    return make_schedule(model_of(one), one)


def chain(*sizes: int) -> Model:
    """A unit for each size, with one parameter of so many elements."""
    units: list[Unit] = []
    source = BATCH
    for index, size in enumerate(sizes):
        output = Value(name=f"unit{index}/output", elements=1, dtype=DType.BF16)
        own = Parameter(name=f"unit{index}.0", shape=(size,))
        segment = Segment(inputs=(source,), outputs=(output,), parameters=(own.name,))
        units.append(Unit(name=f"unit{index}", parameters=(own,), segments=(segment,)))
        source = output.name
    batch = Value(name=BATCH, elements=4, dtype=DType.INT64, requires_gradient=False)
    return Model(name="chain", units=tuple(units), batch=batch)


def updated_by(schedule: Schedule) -> dict[str, str]:
    """The stream on which each bucket is updated."""
    (program,) = schedule.programs
    return {
        operation.id.split("/")[2]: operation.stream
        for operation in walk(program.step)
        if isinstance(operation, Compute) and operation.action is Action.UPDATE
    }


def test_the_first_buckets_of_at_most_the_share_are_updated_on_the_device() -> None:
    schedule = made(strategy(0.5))
    sizes = {layout.name: layout.elements for layout in schedule.layouts}
    streams = updated_by(schedule)
    stays = [name for name, stream in streams.items() if stream == "compute"]
    assert stays == list(sizes)[: len(stays)]
    held, total = sum(sizes[name] for name in stays), sum(sizes.values())
    following = sizes[list(sizes)[len(stays)]]
    assert 0 < held <= total / 2 < held + following


def test_states_of_what_stays_are_on_the_device_and_the_rest_on_the_host() -> None:
    schedule = made(strategy(0.5))
    streams = updated_by(schedule)
    (program,) = schedule.programs
    for buffer in program.buffers:
        if buffer.kind in {Kind.MASTER, Kind.MOMENT}:
            stays = streams[buffer.name.split("/")[0]] == "compute"
            assert buffer.pool == ("device" if stays else "host")


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_stays_is_not_copied_out_nor_back(stage: int) -> None:
    """2 bytes out and 2 back for each of the others; the norm comes in fp64 and goes in fp32."""
    one = strategy(0.5, stage)
    schedule = made(one)
    sizes = {layout.name: layout.elements for layout in schedule.layouts}
    away = sum(sizes[name] for name, stream in updated_by(schedule).items() if stream == "cpu")
    owned = away if stage == 0 else away // 2
    moved = host_bytes(model_of(one), one)
    assert (moved.to_host, moved.from_host) == (2 * owned + 4, 2 * owned + 8)
    assert schedule.contract.host_bytes == (moved,)


@pytest.mark.one_commit_in(6)
@given(
    st.integers(0, 3),
    st.sampled_from((Precision.FP16, Precision.BF16, Precision.FP32)),
    st.sampled_from((0.1, 0.5, 0.9)),
    st.booleans(),
)
@examples(20)
def test_an_update_in_two_places_is_proved(
    stage: int, precision: Precision, share: float, contiguous: bool
) -> None:
    one = strategy(share, stage, precision).but({"zero.contiguous": contiguous})
    one = one.but({"zero.bucket_elements": 100})
    assert not check(made(one), model_of(one))


@pytest.mark.parametrize("share", [1e-9, 0.01, 0.05])
@pytest.mark.parametrize("stage", range(4))
def test_a_share_that_keeps_nothing_is_told_the_least_that_does(share: float, stage: int) -> None:
    one = strategy(share, stage)
    with pytest.raises(ModelError) as told:
        made(one)
    allowed = re.fullmatch(
        rf"offload.device_share: {share:g} must be 0 or at least (0.\d+), what the first bucket is "
        r"of all that is trained; a smaller zero.bucket_elements may make that less",
        str(told.value),
    )
    assert allowed is not None
    least = float(allowed[1])
    assert "compute" in updated_by(made(strategy(least, stage))).values()
    with pytest.raises(ModelError):
        made(strategy(least - 0.001, stage))


@given(st.integers(1, 400), st.integers(1, 400))
def test_the_least_share_that_is_told_keeps_the_first_bucket(first: int, rest: int) -> None:
    one = strategy(1e-9, stage=2).but({"parallel.data": 1, "zero.bucket_elements": 1})
    model = chain(first, rest)
    with pytest.raises(ModelError) as told:
        make_schedule(model, one)
    allowed = re.search(r"at least (\S+),", str(told.value))
    if allowed is None:  # as 400 of 401: three digits do not tell it from 1
        assert first / (first + rest) > 0.999
        assert "keeps nothing on the device: the first bucket is 1 of all" in str(told.value)
        return
    enough = one.but({"offload.device_share": float(allowed[1])})
    assert kept_back(model, enough) == first
    assert "compute" in updated_by(make_schedule(model, enough)).values()


def test_a_share_of_a_hundredth_more_or_less_is_compared_as_it_is_written() -> None:
    """In binary 0.29 times 100 is less than 29."""
    one = strategy(0.29, stage=2).but({"parallel.data": 1, "zero.bucket_elements": 1})
    assert kept_back(chain(29, 71), one) == 29
    assert "compute" in updated_by(make_schedule(chain(29, 71), one)).values()


def test_a_share_of_one_bucket_for_all_is_told_how_it_is_cut() -> None:
    whole = strategy(0.9, stage=2).but({"zero.bucket_elements": 10**6})
    keeps_nothing = "0.9 keeps nothing on the device: the first bucket is 1 of all that is trained;"
    with pytest.raises(ModelError, match=f"{keeps_nothing} a smaller zero.bucket_elements"):
        made(whole)
    changes = {"zero.bucket_elements": BUCKET_ELEMENTS, "zero.fused_buffers": FusedBuffers.MODEL}
    with pytest.raises(ModelError, match=f"{keeps_nothing} zero.fused_buffers = constant makes"):
        made(whole.but(changes))
    with pytest.raises(ModelError, match=r"the first bucket is 1 of all that is trained$"):
        make_schedule(chain(7), whole)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"offload.optimizer": "device"}, "offload.device_share: 0.5 needs optimizer = host"),
        ({"offload.optimizer": "nvme"}, "offload.device_share: 0.5 needs optimizer = host"),
        ({"offload.parameters": "host"}, "device_share: 0.5 is not modelled for parameters = host"),
        ({"offload.delayed_update": True}, "0.5 is not modelled for delayed_update = true"),
        ({"offload.device_share": 1.0}, "offload.device_share: 1 must be less than 1"),
    ],
)
def test_what_cannot_share_its_updates_is_told(changes: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        strategy(0.5).but(changes)
