"""No simulated run of a setting is faster, or takes less memory, than its bounds say."""

from collections.abc import Sequence
from typing import Any

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, composite

from zsim.api.forecast import RUN_FAULTS, forecast, settled_source
from zsim.api.gpu_fleet import gpu_fleet
from zsim.api.setting_trial import Bounder, tried
from zsim.calibration.training_verdict import RunForecast
from zsim.compute.roofline import touched_bytes
from zsim.files.source import settled
from zsim.planner.fleet import Fleet
from zsim.planner.space import RuntimeSpace, SettingGroup, SettingSpace
from zsim.runtimes.registry import copied_bytes, runtimes
from zsim.scenario.tables import from_tables
from zsim.schedule.host_traffic import leaves_device
from zsim.schedule.operation import Copy
from zsim.schedule.schedule import Place
from zsim.study.axis import changed

BLOCK_BYTES = 2 * 2**20

FLEETS = ("8xh100", "16xh100", "4xa100", "16xv100", "4x4090", "16xa100", "32xv100")


@composite
def drawn_settings(draw: DrawFn) -> tuple[list[dict[str, Any]], int]:
    """Draw settings of a group of a small model, and which of them runs."""
    every, number, _ = draw(drawn_groups())
    return every, number


@composite
def drawn_groups(
    draw: DrawFn, names: Sequence[str] = (), *, shares: bool = False
) -> tuple[list[dict[str, Any]], int, SettingGroup]:
    """Draw the same, with the group that they are of; one whose ranks share sequences if asked."""
    fleet = gpu_fleet(draw(st.sampled_from(FLEETS)))
    heads = draw(st.sampled_from((4, 8)))
    tables: dict[str, Any] = {
        "title": "drawn",
        "model": {
            "architecture": draw(st.sampled_from(("gpt", "llama"))),
            "layers": draw(st.integers(2, 5)),
            "hidden_size": heads * draw(st.sampled_from((64, 128, 256))),
            "attention_heads": heads,
            "sequence_length": (16_384 if shares else draw(st.sampled_from((128, 1024, 4096)))),
            "vocab_size": draw(st.sampled_from((1000, 32_000))),
        },
        **fleet.tables,
        "train": {"precision": fleet.precision},
    }
    if draw(st.booleans()):
        tables.pop("compute", None)
        tables.pop("network", None)
    known = runtimes()
    name = draw(st.sampled_from(names or sorted(known)))
    options = known[name].options
    per_node = min(fleet.gpus, fleet.cluster.gpus_per_node)
    space = SettingSpace(
        runtimes=[
            RuntimeSpace(
                name=name,
                stages=(draw(st.sampled_from(options.stages)),),
                has_replicas=options.has_replicas,
                has_pipeline=options.has_pipeline,
                has_context=options.has_context,
            )
        ],
        fleets=[Fleet(gpus=fleet.gpus, gpus_per_node=per_node)],
        sequences=fleet.gpus * draw(st.sampled_from((1, 2, 4))),
        sequence_length=tables["model"]["sequence_length"],
        fixed={},
    )
    groups = [each for each in space.groups() if isinstance(each, SettingGroup)]
    groups = [each for each in groups if not shares or "parallel.context" in each.changes]
    group = draw(st.sampled_from(groups))
    every = [changed(tables, group.setting(number)) for number in range(len(group.knobs))]
    return every, draw(st.integers(0, len(every) - 1)), group


def need_bounded(every: list[dict[str, Any]], number: int, group: SettingGroup) -> None:
    bound, outcome = Bounder().bound_of_all(group, every.__getitem__), tried(every[number])
    if bound.is_full:
        assert not outcome.fits
    if outcome.refusal or bound.why_not:
        return
    assert outcome.step_time_s >= bound.step_time_s * (1 - 1e-9)
    assert not outcome.fits or outcome.memory_bytes >= bound.memory_bytes


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(drawn_groups())
def test_no_run_goes_below_the_bounds_of_its_group(
    case: tuple[list[dict[str, Any]], int, SettingGroup],
) -> None:
    need_bounded(*case)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    schedule=st.sampled_from(["Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"]),
    pipeline=st.sampled_from([2, 4]),
    rounds=st.integers(1, 2),
    length=st.sampled_from([256, 2048]),
    words=st.sampled_from([512, 32_000]),
)
@example(schedule="ZBVZeroBubble", pipeline=8, rounds=1, length=8192, words=128_000)
def test_no_run_of_stages_of_several_chunks_goes_below_its_bounds(
    *, schedule: str, pipeline: int, rounds: int, length: int, words: int
) -> None:
    tables: dict[str, Any] = {
        "title": "bounded",
        "model": {
            "architecture": "llama",
            "layers": 2 * pipeline,
            "hidden_size": 512,
            "attention_heads": 4,
            "sequence_length": length,
            "vocab_size": words,
        },
        **gpu_fleet("8xh100").tables,
        "train": {
            "precision": "bf16",
            "micro_batch_size": 1,
            "gradient_accumulation_steps": rounds * pipeline,
        },
        "parallel": {"pipeline": pipeline, "data": 8 // pipeline},
        "zero": {
            "stage": 3,
            "emulate": "fsdp2",
            "fsdp2": {"pipeline_schedule": schedule, "reshard_after_forward": False},
        },
    }
    bound, outcome = Bounder().bound(tables), tried(tables)
    assert not outcome.refusal
    assert not bound.why_not
    assert outcome.step_time_s >= bound.step_time_s * (1 - 1e-9)
    assert outcome.memory_bytes >= bound.memory_bytes


SHARING = sorted(name for name, each in runtimes().items() if each.options.has_context)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(drawn_groups(names=SHARING, shares=True))
def test_no_run_whose_ranks_share_sequences_goes_below_the_bounds_of_its_group(
    case: tuple[list[dict[str, Any]], int, SettingGroup],
) -> None:
    need_bounded(*case)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(drawn_groups())
def test_no_setting_has_a_bound_below_that_of_its_group(
    case: tuple[list[dict[str, Any]], int, SettingGroup],
) -> None:
    every, number, group = case
    bounder = Bounder()
    default = bounder.bound_of_defaults(group, every.__getitem__)
    least, own = bounder.bound_of_all(group, every.__getitem__), bounder.bound(every[number])
    if not default.why_not and not own.why_not:
        assert own.step_time_s >= least.step_time_s * (1 - 1e-3)
        assert least.step_time_s >= default.kernels_s


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(drawn_groups(names=("deepspeed", "fsdp2", "nanotron")), st.data())
def test_knobs_that_are_said_to_add_to_memory_take_none_away(
    case: tuple[list[dict[str, Any]], int, SettingGroup], data: st.DataObject
) -> None:
    every, number, group = case
    if not (larger := group.larger[number]):
        return
    other = data.draw(st.sampled_from(sorted(larger)))
    one, more = forecast(every[number], None), forecast(every[other], None)
    if isinstance(one, RunForecast) and isinstance(more, RunForecast):
        # Less by next to nothing is at the edge of memory where the other lacks some; of models
        # that fit anywhere it may be a block of the allocator's.
        assert more.peak_allocated_bytes >= 0.99 * one.peak_allocated_bytes - BLOCK_BYTES


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(drawn_settings())
def test_schedules_copy_what_closed_forms_say_or_more(
    case: tuple[list[dict[str, Any]], int],
) -> None:
    every, number = case
    try:
        job = settled_source(every[number]).job()
    except RUN_FAULTS:
        return
    strategy = settled("drawn", from_tables(every[number]))[0].strategy
    if strategy.parallel.pipeline > 1:
        return
    schedule, least = job.schedule, copied_bytes(job.model, strategy)
    places = {pool.name: pool.place for pool in schedule.pools}
    for program in schedule.programs:
        copies = [
            (each.stream, touched_bytes(each, program))
            for each in program.by_id.values()
            if isinstance(each, Copy)
            and places[program.by_name[each.target.buffer].pool] is Place.DEVICE
            and leaves_device(each, program, places) is None
        ]
        on_compute = sum(size for stream, size in copies if stream == "compute")
        assert on_compute >= least.compute
        assert sum(size for _, size in copies) >= least.compute + least.beside
