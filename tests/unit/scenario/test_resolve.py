"""What a scenario means: degrees, nodes and batch sizes that follow, and what contradicts."""

import re
from dataclasses import replace
from fractions import Fraction

import pytest

from zsim.cluster.cluster import Cluster, Fabric, Gpu, Link, Rate, Tier
from zsim.cluster.fabric_kind import FAT_TREE
from zsim.cluster.files import Part, UnknownTopologyError
from zsim.cluster.host_side import Drives, Host
from zsim.cluster.profile.network import NetworkProfile, ProfileError
from zsim.dtype import DType
from zsim.scenario.resolve import resolve
from zsim.scenario.resolved_scenario import ResolvedScenario
from zsim.scenario.sized_cluster import with_overrides
from zsim.scenario.tables import ClusterTable, ScenarioError
from zsim.scenario.toml import parse
from zsim.schedule.schedule import Discipline
from zsim.strategy.activations import Checkpointing
from zsim.strategy.learning_rate import LearningRates
from zsim.strategy.optimizer_rule import LEARNING_RATE, SGD, Adam
from zsim.strategy.precision import Precision
from zsim_lab.fit.constants import START

TEXT = """
title = "two layers"
[model]
layers = 2
hidden_size = 8
attention_heads = 4
sequence_length = 4
vocab_size = 16
[cluster]
topology = "boxes"
nodes = 2
[zero]
stage = 2
[train]
micro_batch_size = 3
gradient_accumulation_steps = 2
"""
ALONE = TEXT.replace(TEXT[TEXT.index("layers = 2") : TEXT.index("[cluster]")], "parameters = 1e6\n")

BOX = Cluster(
    name="boxes",
    nodes=1,
    gpus_per_node=8,
    gpu=Gpu(
        name="gpu",
        memory_bytes=10**9,
        memory_bytes_per_s=10**9,
        rates=tuple(
            Rate(dtype=dtype, peak=10**12, matmul=10**12, elementwise=10**12)
            for dtype in (DType.FP16, DType.FP32)
        ),
    ),
    switch_link=Link(bytes_per_s=10**9),
    nics_per_node=8,
    nic_link=Link(bytes_per_s=10**9),
)


TREE = Fabric(kind=FAT_TREE, tiers=(Tier(name="leaf", nodes_below=4),))


def boxes(
    name: str,
    fabric: str | None,
    nodes: int,
    gpu: str | None,
    /,
    *,
    nodes_per_domain: int | None,
) -> Cluster:
    assert (gpu, nodes_per_domain) == (None, None)
    if fabric is None:
        if name != "boxes":
            raise UnknownTopologyError(f"{name!r} must be boxes")
        return replace(BOX, nodes=nodes)
    if name != "box":
        raise UnknownTopologyError(f"{name!r} must be box", Part.NODE)
    if fabric != "tree":
        raise UnknownTopologyError(f"{fabric!r} must be tree", Part.FABRIC)
    return replace(BOX, nodes=nodes, fabric=TREE)


def constants(name: str) -> NetworkProfile:
    if name != "any":
        raise ProfileError(f"{name!r} must be any")
    return START


def resolved(*settings: str, text: str = TEXT) -> ResolvedScenario:
    return resolve(parse(text, settings), boxes, constants)


def test_fitted_constants_are_had_by_name() -> None:
    assert resolved().cluster.network is None
    assert resolved("network.profile=any").cluster.network == START
    with pytest.raises(ScenarioError, match=r"network\.profile: 'other' must be any"):
        resolved("network.profile=other")
    assert resolved("network.profile=any", "network.profile=none").cluster.network is None


ON_A_TREE = TEXT.replace('topology = "boxes"', 'node = "box"\nfabric = "tree"')


def test_a_node_and_a_fabric_make_a_cluster() -> None:
    cluster = resolved(text=ON_A_TREE).cluster
    assert (cluster.nodes, cluster.fabric) == (2, TREE)
    narrow = resolved("cluster.oversubscription=3/2", text=ON_A_TREE).cluster
    assert [tier.oversubscription for tier in narrow.fabric.tiers] == [Fraction(3, 2)]


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ('"box"', '"bag"', "cluster.node: 'bag' must be box"),
        ('"tree"', '"bush"', "cluster.fabric: 'bush' must be tree"),
        ('node = "box"', "", "cluster.node: missing, cluster.fabric needs one (zsim list nodes)"),
        ('fabric = "tree"', "", "cluster.fabric: missing, cluster.node needs one (zsim list"),
        ('node = "box"\nfabric = "tree"', "", "cluster.topology: missing; give it, or node and"),
        (
            'node = "box"',
            'topology = "boxes"',
            "cluster.fabric: 'tree' cannot be combined with cluster.topology; remove one",
        ),
        (
            'fabric = "tree"',
            'topology = "boxes"',
            "cluster.node: 'box' cannot be combined with cluster.topology; remove one",
        ),
    ],
)
def test_a_topology_or_a_node_on_a_fabric_never_both_nor_half(old: str, new: str, why: str) -> None:
    with pytest.raises(ScenarioError) as caught:
        resolved(text=ON_A_TREE.replace(old, new))
    assert str(caught.value).startswith(why)


def test_oversubscription_is_for_a_fabric_with_leaves() -> None:
    with pytest.raises(ScenarioError) as caught:
        resolved("cluster.oversubscription=2")
    assert str(caught.value) == (
        "cluster.oversubscription: 2 is for a fabric with leaves, single_switch has none"
    )


def test_data_is_what_the_tensor_axis_leaves() -> None:
    strategy = resolved("parallel.tensor=4").strategy
    assert (strategy.parallel.data, strategy.parallel.tensor) == (4, 4)  # 2 nodes of 8


def test_fewer_ranks_than_the_cluster_has_use_the_first_nodes() -> None:
    some = resolved("parallel.data=5")
    assert some.strategy.ranks == 5
    assert some.cluster.nodes == 1  # 5 ranks fit on a node of 8


def test_nodes_left_out_are_as_many_as_the_ranks_need() -> None:
    many = resolved("parallel.data=1024", text=TEXT.replace("nodes = 2", ""))
    assert many.cluster.nodes == 1024 // 8
    odd = resolved("parallel.data=9", text=TEXT.replace("nodes = 2", ""))
    assert odd.cluster.nodes == 2


def test_the_cluster_says_what_the_scenario_replaces() -> None:
    cluster = resolved("cluster.gpu_memory=40 GB", "cluster.nics_per_node=4").cluster
    assert cluster.gpu.memory_bytes == 40 * 10**9
    assert cluster.gpu.usable_bytes(communicators=3) == 40 * 10**9  # nothing is off what was given
    assert cluster.nics_per_node == 4


def test_a_node_has_as_many_drives_as_the_scenario_says_where_what_one_does_is_known() -> None:
    drives = Drives(count=8, capacity_bytes=10**12, write_bytes_per_s=10**9)
    known = replace(BOX, drives=drives)
    assert with_overrides(ClusterTable(drives=3), known).drives == replace(drives, count=3)
    wanted = "cluster.drives: 3: boxes does not describe its drives; use another node"
    with pytest.raises(ScenarioError, match=re.escape(wanted)):
        resolved("cluster.drives=3")


def test_gpus_without_nvlink_meet_over_their_pcie_slots() -> None:
    slot = Link(bytes_per_s=63 * 10**9)
    known = replace(BOX, pcie_link=slot)
    without = with_overrides(ClusterTable(nvlink=False), known)
    assert without.switch_link == replace(slot, latency_ps=2_850_000)  # half of NCCL's ring step
    assert without.over_pcie
    direct = replace(known, has_switch=False)
    assert with_overrides(ClusterTable(nvlink=False), direct) == without
    assert with_overrides(ClusterTable(), known).switch_link == BOX.switch_link
    with pytest.raises(ScenarioError, match=r"nvlink: false: .* does not describe its PCIe"):
        with_overrides(ClusterTable(nvlink=False), replace(BOX, pcie_link=None))


def test_a_node_has_as_much_host_memory_as_the_scenario_says() -> None:
    host = Host(memory_bytes=10**12, memory_bytes_per_s=10**11, pinned_bytes=5 * 10**11)
    asked = ClusterTable.model_validate({"host_memory": "64 GB"})
    found = with_overrides(asked, replace(BOX, host=host)).host
    assert found == replace(host, memory_bytes=64 * 10**9, pinned_bytes=64 * 10**9)
    with pytest.raises(ScenarioError, match=re.escape("cluster.host_memory: 64")):
        with_overrides(asked, replace(BOX, host=None))


def test_the_allocator_is_pytorchs_unless_the_scenario_says_otherwise() -> None:
    assert resolved().allocator is Discipline.CACHING
    assert resolved("cluster.allocator=expandable").allocator is Discipline.EXPANDABLE


@pytest.mark.parametrize(
    ("given", "micro", "steps"),
    [
        ((3, 2, None), 3, 2),
        ((3, None, 96), 3, 2),  # 96 = 3 x 2 x 16 replicas
        ((None, 2, 96), 3, 2),
        ((3, 2, 96), 3, 2),
    ],
)
def test_two_batch_sizes_say_the_third(
    given: tuple[int | None, int | None, int | None], micro: int, steps: int
) -> None:
    names = ("micro_batch_size", "gradient_accumulation_steps", "global_batch_size")
    lines = [f"{name} = {value}" for name, value in zip(names, given, strict=True) if value]
    text = TEXT[: TEXT.index("micro_batch_size")] + "\n".join(lines)
    found = resolved(text=text)
    assert found.micro_batch_size == micro
    assert found.strategy.train.gradient_accumulation_steps == steps


def test_parameters_alone_are_a_model_of_that_many() -> None:
    assert resolved(text=ALONE).make_model().parameter_count == 10**6


def test_every_table_reaches_the_strategy() -> None:
    strategy = resolved(
        "zero.prefetch_units=3",
        "activations.checkpointing=full",
        "activations.partition=true",
        "zero.contiguous=true",
        "zero.fused_buffers=model",
        "train.precision=fp16",
        "train.clip_norm=1.5",
        "train.loss_scale.interval=7",
        "train.beta2=0.95",
    ).strategy
    assert strategy.zero.prefetch_units == 3
    assert strategy.activations.checkpointing is Checkpointing.FULL
    assert strategy.activations.partition
    assert strategy.zero.contiguous
    assert strategy.zero.fused_buffers == "model"
    assert strategy.train.precision is Precision.FP16
    assert strategy.train.clip_norm == 1.5
    assert strategy.train.loss_scale.interval == 7
    assert strategy.train.optimizer == Adam(beta2=0.95)
    sgd = resolved("train.optimizer=sgd", "train.learning_rate=0.5").strategy.train.optimizer
    assert sgd == SGD(learning_rate=0.5)
    momentum = resolved(
        "train.optimizer=sgd", "train.momentum=0.9", "train.nesterov=true", "train.weight_decay=0.1"
    ).strategy.train.optimizer
    given = resolved(
        "train.learning_rate=0.5", "train.beta2=0.95", "train.learning_rates.decay_steps=9"
    ).strategy
    assert given.train.optimizer == Adam(learning_rate=LEARNING_RATE, beta2=0.95)
    assert given.train.learning_rates == LearningRates(peak=0.5, decay_steps=9)
    assert momentum == SGD(momentum=0.9, nesterov=True, weight_decay=0.1)


def test_groups_of_parameters_have_constants_of_their_own() -> None:
    strategy = resolved(
        "train.weight_decay=0.1",
        'train.group=[{parameters=["*.bias", "*.ln*"], weight_decay=0}, '
        '{parameters=["head.*"], learning_rate=0.5}]',
    ).strategy
    assert strategy.rule_of("block0.ln1.weight") == Adam()
    assert strategy.rule_of("head.ln.weight") == Adam()  # the first group that has it
    assert strategy.rule_of("head.weight") == Adam(learning_rate=0.5, weight_decay=0.1)
    assert strategy.rule_of("block0.up.weight") == Adam(weight_decay=0.1)


WRONG = {
    "train.group=[{weight_decay=0}]": "train.group.0.parameters: missing",
    'train.group=[{parameters=["*"],momentum=0.5}]': "train.group.0.momentum: 0.5 is not for adam",
    'train.optimizer=sgd train.group=[{parameters=["*"],momentum=0.5}]': (
        "train.group.0: keeps momentum_buffer, must keep no states as sgd does"
    ),
    "train.learning_rate=1.0 train.learning_rates.decay=constant "
    'train.group=[{parameters=["*"],learning_rate=0.5}]': (
        "train.group.0.learning_rate: 0.5 stands beside learning_rates"
    ),
    "parallel.tensor=3": "parallel.tensor: 3 must divide the 16 ranks of the cluster",
    "parallel.tensor=16": "parallel.tensor: 16 must divide attention_heads 4",
    "parallel.data=17": "parallel.data: 17 must be at most 16: the cluster has 16 ranks",
    "cluster.topology=balls": "cluster.topology: 'balls' must be boxes",
    "train.global_batch_size=97": "train.global_batch_size: 97 must be 96: 3 a micro-batch x 2",
    "train.beta1=0.5 train.optimizer=sgd": "train.beta1: 0.5 is not for sgd, which takes learning",
    "train.loss=fused zero.emulate=nanotron zero.stage=1": "train.loss: 'fused' must be torch for",
    "train.loss=chunked_head train.metrics=2": "train.metrics: 2 needs whole logits, which",
    "train.nesterov=true": "train.nesterov: true is not for adam, which takes learning_rate, beta1",
    "train.nesterov=true train.optimizer=sgd": "train.nesterov: true needs a momentum of more than",
    "train.learning_rates.decay=constant": "train.learning_rate: missing; learning_rates go up to",
    "train.learning_rate=1.0 train.learning_rates.warmup_steps=9": (
        "train.learning_rates.decay_steps: missing; must be more than warmup_steps 9"
    ),
    "train.learning_rate=1.0 train.learning_rates.minimum=2.0": (
        "train.learning_rates.minimum: 2 must be from 0 to the peak 1.0"
    ),
    "train.learning_rate=1.0 train.learning_rates.decay=constant "
    "train.learning_rates.decay_steps=9": (
        "train.learning_rates.decay_steps: 9 is not for decay = constant"
    ),
    "train.loss_scale.minimum=1e9": (
        "train.loss_scale.minimum: 1000000000 must be at most initial 65536.0"
    ),
    "train.precision=bf16": "train.precision: bf16: gpu gpu: no rate for bf16, it has fp16, fp32",
    "activations.partition=true": "activations.partition: true needs checkpointing = full",
    "zero.stage=3 zero.emulate=fsdp2 zero.fsdp2.offload_policy=cpu": (
        "zero.fsdp2.offload_policy: host needs host memory behind PCIe, which boxes does not "
        "describe; use another node, or a file of it with [host]"
    ),
    "zero.stage=3 zero.emulate=deepspeed zero.deepspeed.offload_param.device=nvme "
    "zero.deepspeed.offload_optimizer.device=cpu": (
        "zero.deepspeed.offload_optimizer.device: host needs host memory behind PCIe, which boxes "
        "does not describe; use another node"
    ),
    "offload.checkpoints=host": (
        "offload.checkpoints: 'host' needs activations.checkpointing = full"
    ),
    "activations.offload=true": (
        "activations.offload: is not here any more: say offload.checkpoints = host"
    ),
    "offload.checkpoints=host activations.checkpointing=full": (
        "offload.checkpoints: host needs host memory behind PCIe, which boxes does not describe; "
    ),
    "zero.fused_buffers=model zero.stage=3": "zero.fused_buffers: 'model' is for stages 0 to 2",
    "zero.fused_buffers=model zero.bucket_elements=9": "zero.bucket_elements: 9 is for fused_buff",
    "zero.contiguous=true zero.emulate=fsdp2 zero.stage=3": "zero.contiguous: true is for zsim's",
    "model.attention_heads=3": "model.attention_heads: 3 must divide hidden_size 8",
    "model.parameters=7.5e9": "model.parameters: 7500000000 stands alone, without layers",
    "model.lora.rank=2 parallel.tensor=2": "model.lora: not modelled with tensor 2, allowed is 1",
    'model.frozen=["blok*"]': "model.frozen: 'blok*' is the name of no parameter; there are",
    'model.frozen=["*"]': "model.frozen: '*' leave nothing to train",
    'model.lora={rank=2,targets=["k_proj"]}': "model.lora.targets: 'k_proj' must be one of q,",
}


@pytest.mark.parametrize("settings", WRONG)
def test_fields_that_contradict_each_other_are_named_as_the_file_names_them(settings: str) -> None:
    with pytest.raises(ScenarioError) as caught:
        resolved(*settings.split(" ")).make_job()
    assert str(caught.value).startswith(WRONG[settings])


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("nodes = 2", "", "cluster.nodes: missing; give it, or parallel.data"),
        ("layers = 2", "", "model.layers: missing; a model has layers, hidden_size"),
        ("micro_batch_size = 3", "", "train.micro_batch_size: missing; give two of"),
        (
            "gradient_accumulation_steps = 2",
            "global_batch_size = 100",
            "train.global_batch_size: 100 must be a multiple of 48: 3 a micro-batch x 16 replicas",
        ),
        (
            "micro_batch_size = 3\ngradient_accumulation_steps = 2",
            "global_batch_size = 100",
            "train.micro_batch_size: missing; give it or gradient_accumulation_steps",
        ),
    ],
)
def test_what_is_missing_is_named(old: str, new: str, why: str) -> None:
    with pytest.raises(ScenarioError) as caught:
        resolved(text=TEXT.replace(old, new))
    assert str(caught.value).startswith(why)


def test_a_table_that_is_missing_is_explained_by_its_keys() -> None:
    head, _, _ = TEXT.partition("[train]")
    with pytest.raises(ScenarioError) as caught:
        resolved(text=head)
    why = "train.micro_batch_size, train.gradient_accumulation_steps: missing; give two of "
    assert str(caught.value).startswith(why)


def test_all_keys_that_are_missing_are_told_at_once() -> None:
    text = TEXT
    for key in ("layers = 2", "nodes = 2", "stage = 2", "micro_batch_size = 3"):
        assert key in text
        text = text.replace(key, "")
    with pytest.raises(ScenarioError) as caught:
        resolved("model.hidden_size=none", text=text)
    told = [each.partition(": missing; ")[0] for each in str(caught.value).split("; also ")]
    assert told == [
        "cluster.nodes",
        "zero.stage",
        "model.layers, model.hidden_size",
        "train.micro_batch_size",
    ]


def test_too_few_parameters_alone_are_refused() -> None:
    with pytest.raises(ScenarioError, match=r"^model\.parameters: 31 must be at least 32"):
        resolved("model.parameters=31", text=ALONE).make_model()


def test_selective_checkpointing_keeps_all_but_the_softmax_of_scores() -> None:
    plain = ["model.attention=plain", "parallel.tensor=1"]
    both = [f"activations.checkpointing={each}" for each in ("none", "selective")]
    kept = [resolved(*plain, each).make_model().units[1].segments[0] for each in both]
    # 3 sequences of 4 heads and 4 x 4 scores in fp32.
    assert kept[0].saved_bytes - kept[1].saved_bytes == 3 * 4 * 4 * 4 * 4
    assert len(kept[1].backward) == len(kept[0].backward) + 3  # scores, softmax, result
    flash = [resolved(each).make_model().units for each in both]
    assert flash[0] == flash[1]
