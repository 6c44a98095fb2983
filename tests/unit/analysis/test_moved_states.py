"""Remedies that move states between tiers of memory: which are offered, from mild to strong."""

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
    scenario = described("tiers", FOR_TESTS, Changes(settings=settings))
    job = resolved("tiers", scenario).job()
    strategy = job.schedule.contract.strategy
    assert strategy is not None
    subject = TightScenario(
        scenario=scenario, strategy=strategy, model=job.model, cluster=job.cluster
    )
    changes = [each.settings for family in families(subject) for each in family]
    moved = ("offload.optimizer", "offload.parameters", "offload.gradients", "host.")
    return [each for each in changes if any(key.startswith(moved) for key in each)]


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
