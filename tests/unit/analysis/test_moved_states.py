"""Remedies that move states between tiers of memory: which are offered, from mild to strong."""

import pytest

from zsim.analysis.remedies import TightScenario, families
from zsim.files.source import Changes, described, resolved

FOR_TESTS = {
    "title": "tiers",
    "model": {
        "layers": 2,
        "hidden_size": 64,
        "attention_heads": 4,
        "sequence_length": 64,
        "vocab_size": 256,
    },
    "cluster": {"node": "dgx2", "fabric": "single_switch", "nodes": 1},
    "zero": {"stage": 3},
    "train": {"micro_batch_size": 1, "gradient_accumulation_steps": 1, "precision": "fp16"},
}


def offered(*settings: str) -> list[tuple[str, ...]]:
    """Return the settings of all changes to where states are, and to how memory is pinned."""
    moved = ("offload.optimizer", "offload.parameters", "offload.gradients", "host.")
    return [each for each in every(*settings) if any(key.startswith(moved) for key in each)]


def every(*settings: str) -> list[tuple[str, ...]]:
    """Return the settings of all changes."""
    scenario = described("tiers", FOR_TESTS, Changes(settings=settings))
    job = resolved("tiers", scenario).job()
    strategy = job.schedule.contract.strategy
    assert strategy is not None
    subject = TightScenario(
        scenario=scenario, strategy=strategy, model=job.model, cluster=job.cluster
    )
    return [each.settings for family in families(subject) for each in family]


def test_states_go_to_the_host_and_then_to_drives_optimizer_first() -> None:
    on_host = ("offload.optimizer=host", "offload.parameters=host")
    assert offered() == [
        on_host[:1],
        on_host,
        ("offload.optimizer=nvme", "offload.parameters=host"),
        ("offload.optimizer=nvme", "offload.parameters=nvme"),
        ("offload.optimizer=nvme", "offload.parameters=nvme", "offload.gradients=nvme"),
    ]


def test_parameters_stay_where_every_rank_has_them_whole() -> None:
    assert offered("zero.stage=2") == [
        ("offload.optimizer=host",),
        ("offload.optimizer=nvme",),
        ("offload.optimizer=nvme", "offload.gradients=nvme"),
    ]


def test_nothing_goes_to_drives_whose_rates_nobody_knows() -> None:
    assert offered("cluster.node=dgx_h100", "zero.stage=2") == [("offload.optimizer=host",)]


def test_pinned_memory_in_exact_sizes_is_offered_where_any_is_used() -> None:
    used = ("offload.optimizer=host", "zero.stage=2", "cluster.node=dgx_h100")
    assert offered(*used) == [("host.pinned=exact",)]
    assert not offered(*used, "host.pinned=exact")
    assert not offered("zero.emulate=fsdp2", "cluster.node=dgx_h100")


@pytest.mark.parametrize(
    ("runtime", "option"),
    [
        ("fsdp1", "zero.fsdp1.offload_wrapper=true"),
        ("fsdp2", "zero.fsdp2.offload_wrapper=true"),
        ("deepspeed", "zero.deepspeed.cpu_checkpointing=true"),
        (None, "offload.checkpoints=host"),
    ],
)
def test_checkpoints_go_to_the_host_by_the_option_of_the_runtime(
    runtime: str | None, option: str
) -> None:
    settings = () if runtime is None else (f"zero.emulate={runtime}",)
    full = "activations.checkpointing=full"
    assert moved_checkpoints(*settings) == [(full, option)]
    assert moved_checkpoints(*settings, full) == [(option,)]
    assert moved_checkpoints(*settings, full, option) == []


def test_stages_of_a_pipeline_are_offered_checkpoints_on_the_host() -> None:
    staged = ("zero.emulate=fsdp2", "parallel.pipeline=2", "train.gradient_accumulation_steps=2")
    full, option = "activations.checkpointing=full", "zero.fsdp2.offload_wrapper=true"
    assert moved_checkpoints(*staged) == [(full, option)]


def test_runtimes_that_keep_checkpoints_on_the_device_are_offered_nothing() -> None:
    for runtime in ("megatron", "nanotron"):
        assert moved_checkpoints(f"zero.emulate={runtime}", "zero.stage=1") == []


def moved_checkpoints(*settings: str) -> list[tuple[str, ...]]:
    """Return the changes that move checkpoints."""
    moves = ("offload.checkpoints", "offload_wrapper", "cpu_checkpointing")
    return [each for each in every(*settings) if any(move in key for key in each for move in moves)]
