"""`expert_parallel` of a ds_config.json: AutoEP, its ranks, and options that are not modelled."""

import pytest
from read_deepspeed_config import Config, named, read

from zsim.scenario.runtime_tables import emulated
from zsim.scenario.tables import ScenarioError
from zsim_runtimes.deepspeed.options import DeepSpeed, ExpertLayer


def config(**options: object) -> Config:
    return {
        "zero_optimization": {"stage": 2},
        "expert_parallel": {"enabled": True, "autoep_size": 4, **options},
    }


def test_ranks_of_experts_are_those_of_auto_ep() -> None:
    found = read(config(preset_model="mixtral", use_grouped_mm=True, score_apply="auto"))
    assert found.parallel.expert == 4
    assert emulated(found.zero) == DeepSpeed(expert_layer=ExpertLayer.AUTO_EP)
    assert not named(config(preset_model="mixtral", expert_w3=None))
    said = {"comm_backend": "comm", "gate_up_impl": "separate", "row_weighting_impl": "auto"}
    more = {"top_k": "auto", "score_func": "auto", "num_expert_groups": None}
    assert read(config(**said, **more, async_split_plan=False)) == read(config())


def test_a_section_that_is_not_enabled_has_no_effect() -> None:
    off = config(enabled=False, use_grouped_mm=False)
    assert read(off) == read({"zero_optimization": {"stage": 2}})
    del off["expert_parallel"]
    assert read(off).parallel.expert == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("expert_tensor_parallel_size", 2),
        ("use_grouped_mm", False),
        ("score_apply", "pre"),
        ("combine_impl", "legacy_bmm"),
        ("load_balance_coeff", 0.1),
        ("top_k", 1),
        ("num_limited_groups", 2),
        ("disable_triton_grouped_mm", True),
        ("unheard_of", 1),
    ],
)
def test_options_of_auto_ep_that_are_not_modelled_are_refused(name: str, value: object) -> None:
    with pytest.raises(ScenarioError, match=rf"expert_parallel\.{name}"):
        read(config(**{name: value}))


def test_no_rank_of_experts_is_refused() -> None:
    with pytest.raises(
        ScenarioError, match=r"expert_parallel\.autoep_size: 0 must be a whole number from 1 "
    ):
        read(config(autoep_size=0))
