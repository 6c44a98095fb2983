"""No simulated run of a setting is faster, or takes less memory, than its bounds say."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, composite

from zsim.api.forecast import RUN_FAULTS, forecast, settled_source
from zsim.api.gpu_fleet import gpu_fleet
from zsim.api.run_forecast import RunForecast
from zsim.compute.roofline import touched_bytes
from zsim.files.source import settled
from zsim.prediction.memory_margin import TIGHT
from zsim.runtimes.lookup import runtimes, search_of
from zsim.runtimes.registry import copied_bytes
from zsim.scenario.changes import changed
from zsim.scenario.tables import from_tables
from zsim.schedule.host_traffic import leaves_device
from zsim.schedule.operation import Copy
from zsim.schedule.schedule import Place
from zsim_plan.answer.setting_trial import Bounder, SettingOutcome, tried
from zsim_plan.bounds.fused_bounds import fused_backward_s, fused_forward_s
from zsim_plan.bounds.rank_speeds import KernelTime, RankSpeeds
from zsim_plan.search.fleet import Fleet
from zsim_plan.search.space import RuntimeSpace, SettingGroup, SettingSpace

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
        layers=tables["model"]["layers"],
        fixed={},
    )
    groups = [each for each in space.groups() if isinstance(each, SettingGroup)]
    groups = [each for each in groups if not shares or "parallel.context" in each.changes]
    group = draw(st.sampled_from(groups))
    every = [changed(tables, group.setting(number)) for number in range(len(group.knobs))]
    return every, draw(st.integers(0, len(every) - 1)), group


def need_bounded(every: list[dict[str, Any]], number: int, group: SettingGroup) -> None:
    bounder = Bounder()
    bound, outcome = bounder.bound_of_all(group, every.__getitem__), tried(every[number])
    if bound.is_full:
        assert not outcome.fits
    if outcome.refusal or bound.why_not:
        return
    assert not (bound.is_unsure and outcome.is_sure)
    bound = bounder.sharpened(bound, group, every[0])
    assert outcome.step_time_s >= bound.step_time_s * (1 - 1e-9)
    assert not outcome.fits or outcome.memory_bytes >= bound.memory_bytes


@pytest.mark.one_commit_in(9)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(drawn_groups())
def test_no_run_goes_below_the_bounds_of_its_group(
    case: tuple[list[dict[str, Any]], int, SettingGroup],
) -> None:
    need_bounded(*case)


@pytest.mark.one_commit_in(21)
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


@pytest.mark.one_commit_in(12)
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    pipeline=st.sampled_from([2, 4]),
    tensor=st.sampled_from([1, 2]),
    layers_of_chunk=st.sampled_from([None, 1, 2]),
    overlaps=st.booleans(),
    rounds=st.integers(1, 5),
    length=st.sampled_from([256, 4096]),
    fleet=st.sampled_from(["8xh100", "16xh100", "4x4090", "16xv100"]),
)
@example(
    pipeline=4,
    tensor=1,
    layers_of_chunk=1,
    overlaps=True,
    rounds=5,
    length=4096,
    fleet="16xh100",
)
def test_no_run_of_megatron_stages_goes_below_the_waits_for_messages(
    *,
    pipeline: int,
    tensor: int,
    layers_of_chunk: int | None,
    overlaps: bool,
    rounds: int,
    length: int,
    fleet: str,
) -> None:
    gpus = gpu_fleet(fleet)
    assume(gpus.gpus >= pipeline * tensor and (overlaps or pipeline > 2))
    changes: dict[str, object] = {
        "zero.emulate": "megatron",
        "zero.stage": 1,
        "parallel.tensor": tensor,
        "parallel.pipeline": pipeline,
        "parallel.data": gpus.gpus // pipeline // tensor,
        "train.micro_batch_size": 1,
        "train.gradient_accumulation_steps": rounds * pipeline,
    }
    if layers_of_chunk:
        changes["zero.megatron.num_layers_per_virtual_pipeline_stage"] = layers_of_chunk
        changes["zero.megatron.overlap_p2p_comm"] = overlaps
    tables = changed(
        {
            "title": "stages",
            "model": {
                "architecture": "llama",
                "layers": 4 * pipeline,
                "hidden_size": 512,
                "attention_heads": 4,
                "sequence_length": length,
                "vocab_size": 32_000,
            },
            **gpus.tables,
            "train": {"precision": gpus.precision},
        },
        changes,
    )
    of_node = min(gpus.gpus, gpus.cluster.gpus_per_node)
    group = SettingGroup(
        fleet=Fleet(gpus=gpus.gpus, gpus_per_node=of_node), changes=changes, knobs=({},)
    )
    bounder = Bounder()
    bound, outcome = bounder.bound(tables), tried(tables)
    assert not outcome.refusal
    assert not bound.why_not
    sharp = bounder.sharpened(bound, group, tables)
    assert outcome.step_time_s >= sharp.step_time_s * (1 - 1e-9)
    assert sharp.step_time_s >= bound.step_time_s


MEGATRON_MODES = (
    {"sequence_parallel": True, "tp_comm_overlap": True},
    {"sequence_parallel": True, "async_tensor_model_parallel_allreduce": True},
    {"async_tensor_model_parallel_allreduce": True},
)


def fused_tables(
    mode: dict[str, bool], *, tensor: int, pipeline: int, length: int, hidden: int
) -> dict[str, Any]:
    return {
        "title": "fused",
        "model": {
            "architecture": "llama",
            "layers": 2,
            "hidden_size": hidden,
            "attention_heads": 16,
            "sequence_length": length,
            "vocab_size": 32_000,
        },
        **gpu_fleet("8xh100").tables,
        "train": {
            "precision": "bf16",
            "micro_batch_size": 1,
            "gradient_accumulation_steps": 2 * pipeline,
        },
        "parallel": {"tensor": tensor, "pipeline": pipeline, "data": 8 // tensor // pipeline},
        "zero": {"stage": 1, "emulate": "megatron", "megatron": mode},
    }


@pytest.mark.one_commit_in(9)
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    mode=st.sampled_from(MEGATRON_MODES),
    tensor=st.sampled_from([2, 4]),
    pipeline=st.sampled_from([1, 2]),
    length=st.sampled_from([512, 4096, 16_384]),
    hidden=st.sampled_from([1024, 8192]),
)
def test_no_run_with_fused_collectives_goes_below_its_bounds(
    *, mode: dict[str, bool], tensor: int, pipeline: int, length: int, hidden: int
) -> None:
    tables = fused_tables(mode, tensor=tensor, pipeline=pipeline, length=length, hidden=hidden)
    bound, outcome = Bounder().bound(tables), tried(tables)
    assert not outcome.refusal
    assert outcome.step_time_s >= bound.step_time_s * (1 - 1e-9)


@pytest.mark.parametrize("mode", MEGATRON_MODES)
def test_fused_collectives_raise_the_bound_of_the_kernels_that_they_slow_down(
    mode: dict[str, bool],
) -> None:
    tables = fused_tables(mode, tensor=4, pipeline=1, length=4096, hidden=8192)
    resolved, _ = settled("fused", from_tables(tables))
    model, strategy = resolved.make_model(), resolved.strategy
    speeds = RankSpeeds(
        kernels=lambda _: KernelTime(0.0, 0.0),
        tensor=lambda *_: 0.0,
        copied_bytes_per_s=1e12,
        collective_share=0.1,
        link_bytes_per_s=1e11,
    )
    block = model.units[1].segments
    forward = [fused_forward_s(model, each, strategy, speeds, is_left=False) for each in block]
    backward = [fused_backward_s(model, each, strategy, speeds) for each in block]
    assert max(backward) > 0
    # Only userbuffers are filled by a copy before a gather in forward.
    assert (max(forward) > 0) is mode.get("tp_comm_overlap", False)


SHARING = sorted(name for name, each in runtimes().items() if each.options.has_context)


@pytest.mark.one_commit_in(9)
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(drawn_groups(names=SHARING, shares=True))
def test_no_run_whose_ranks_share_sequences_goes_below_the_bounds_of_its_group(
    case: tuple[list[dict[str, Any]], int, SettingGroup],
) -> None:
    need_bounded(*case)


@pytest.mark.one_commit_in(9)
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


@pytest.mark.one_commit_in(9)
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    layers=st.sampled_from([4, 8]),
    fleet=st.sampled_from(["8xh100", "16xa100"]),
    name=st.sampled_from(sorted(runtimes())),
    sequences=st.sampled_from([16, 32]),
    data=st.data(),
)
def test_bounds_that_share_models_and_kinds_of_units_are_those_of_each_setting_alone(
    *, layers: int, fleet: str, name: str, sequences: int, data: st.DataObject
) -> None:
    gpus, options = gpu_fleet(fleet), runtimes()[name].options
    tables = {
        "title": "shared",
        "model": {
            "architecture": "llama",
            "layers": layers,
            "hidden_size": 512,
            "attention_heads": 8,
            "sequence_length": 1024,
            "vocab_size": 1000,
        },
        **gpus.tables,
        "train": {"precision": gpus.precision},
    }
    space = SettingSpace(
        runtimes=[
            RuntimeSpace(
                name=name,
                stages=options.stages,
                has_replicas=options.has_replicas,
                has_pipeline=options.has_pipeline,
                has_context=options.has_context,
            )
        ],
        fleets=[Fleet(gpus=gpus.gpus, gpus_per_node=min(gpus.gpus, gpus.cluster.gpus_per_node))],
        sequences=sequences,
        sequence_length=1024,
        layers=layers,
        fixed={},
    )
    groups = [each for each in space.groups() if isinstance(each, SettingGroup)]
    chosen = data.draw(st.lists(st.sampled_from(groups), min_size=2, max_size=6))
    shared = Bounder()
    for group in chosen:
        own = changed(tables, group.setting(0))
        one, other = shared.bound(own), Bounder().bound(own)
        assert one.memory_bytes == other.memory_bytes
        assert (one.why_not, one.is_unsure) == (other.why_not, other.is_unsure)
        assert one.step_time_s == pytest.approx(other.step_time_s, rel=1e-12)
        assert one.kernels_s == pytest.approx(other.kernels_s, rel=1e-12)
        if not one.why_not:
            sharp = [each.sharpened(one, group, own) for each in (shared, Bounder())]
            assert sharp[0].step_time_s == pytest.approx(sharp[1].step_time_s, rel=1e-12)


def with_memory(tables: dict[str, Any], size_bytes: int) -> dict[str, Any]:
    """The tables with GPUs of which a rank may reserve so much."""
    return changed(tables, {"cluster.gpu_memory": f"{size_bytes} B"})


@pytest.mark.one_commit_in(12)
@settings(
    max_examples=20,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
@given(drawn_groups(names=sorted(name for name in runtimes() if search_of(name).adds)), st.data())
def test_no_setting_fits_with_knobs_that_add_to_what_fills_the_memory_without(
    case: tuple[list[dict[str, Any]], int, SettingGroup], data: st.DataObject
) -> None:
    every, number, group = case
    assume(group.larger[number])
    other = data.draw(st.sampled_from(sorted(group.larger[number])))
    one = forecast(every[number], None)
    assume(isinstance(one, RunForecast))
    assert isinstance(one, RunForecast)
    kept = one.kept_bytes
    # Of less memory than it keeps, and of the most of which that leaves next to nothing.
    assert not tried(with_memory(every[other], kept - 1)).fits
    edge = tried(with_memory(every[other], int(kept / TIGHT) - 1))
    assert not edge.fits or edge.is_tight


@pytest.mark.parametrize(("kept", "too_much"), [(9, False), (10, False), (11, True)])
def test_a_setting_keeps_too_much_if_it_keeps_more_than_there_is(kept: int, too_much: bool) -> None:
    outcome = SettingOutcome(kept_bytes=kept, usable_bytes=10)
    assert outcome.keeps_too_much is too_much


def test_a_model_of_few_layers_may_fit_only_with_knobs_that_add_to_memory() -> None:
    """Nothing has to be gathered again beside what is reduced."""
    tables = {
        "title": "two layers",
        "model": {
            "architecture": "gpt",
            "layers": 2,
            "hidden_size": 256,
            "attention_heads": 4,
            "sequence_length": 128,
            "vocab_size": 32_000,
        },
        "cluster": {"node": "dgx_h100", "fabric": "rail_optimized", "gpu_memory": "198 MB"},
        "parallel": {"data": 16},
        "zero": {"stage": 3, "emulate": "fsdp2"},
        "activations": {"checkpointing": "operations"},
        "train": {"precision": "bf16", "micro_batch_size": 2, "gradient_accumulation_steps": 2},
    }
    found = {
        kept: tried(changed(tables, {"zero.fsdp2.reshard_after_forward": not kept}))
        for kept in (False, True)
    }
    assert (found[False].fits, found[True].fits) == (False, True)
    assert not found[False].keeps_nearly_all


@pytest.mark.one_commit_in(9)
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
