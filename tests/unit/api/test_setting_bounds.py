"""No simulated run of a setting is faster, or takes less memory, than its bounds say."""

from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, composite

from zsim.api.gpu_fleet import gpu_fleet
from zsim.api.setting_trial import Bounder, tried
from zsim.planner.space import Fleet, RuntimeSpace, SettingGroup, SettingSpace
from zsim.runtimes.registry import runtimes
from zsim.study.axis import changed

FLEETS = ("8xh100", "16xh100", "4xa100", "16xv100", "4x4090", "16xa100", "32xv100")


@composite
def drawn_settings(draw: DrawFn) -> tuple[list[dict[str, Any]], int]:
    """Draw a group of settings of a small model, and which of them runs."""
    fleet = gpu_fleet(draw(st.sampled_from(FLEETS)))
    heads = draw(st.sampled_from((4, 8)))
    tables: dict[str, Any] = {
        "title": "drawn",
        "model": {
            "architecture": draw(st.sampled_from(("gpt", "llama"))),
            "layers": draw(st.integers(2, 5)),
            "hidden_size": heads * draw(st.sampled_from((64, 128, 256))),
            "attention_heads": heads,
            "sequence_length": draw(st.sampled_from((128, 1024, 4096))),
            "vocab_size": draw(st.sampled_from((1000, 32_000))),
        },
        **fleet.tables,
        "train": {"precision": fleet.precision},
    }
    if draw(st.booleans()):
        tables.pop("compute", None)
        tables.pop("network", None)
    known = runtimes()
    name = draw(st.sampled_from(sorted(known)))
    options = known[name].options
    per_node = min(fleet.gpus, fleet.cluster.gpus_per_node)
    space = SettingSpace(
        runtimes=[
            RuntimeSpace(
                name=name,
                stages=(draw(st.sampled_from(options.stages)),),
                has_replicas=options.has_replicas,
                has_pipeline=options.has_pipeline,
            )
        ],
        fleets=[Fleet(gpus=fleet.gpus, gpus_per_node=per_node)],
        sequences=fleet.gpus * draw(st.sampled_from((1, 2, 4))),
        fixed={},
    )
    groups = [each for each in space.groups() if isinstance(each, SettingGroup)]
    group = draw(st.sampled_from(groups))
    every = [changed(tables, group.setting(number)) for number in range(len(group.knobs))]
    return every, draw(st.integers(0, len(every) - 1))


def need_bounded(every: list[dict[str, Any]], number: int) -> None:
    bound, outcome = Bounder().bound_of_all(every), tried(every[number])
    if bound.is_full:
        assert not outcome.fits
    if outcome.refusal or bound.why_not:
        return
    assert outcome.step_time_s >= bound.step_time_s * (1 - 1e-9)
    assert not outcome.fits or outcome.memory_bytes >= bound.memory_bytes


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(drawn_settings())
def test_no_run_goes_below_the_bounds_of_its_group(
    case: tuple[list[dict[str, Any]], int],
) -> None:
    need_bounded(*case)
