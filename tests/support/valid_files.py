"""Files that are right, of every kind that a command reads."""

import json
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from inspect import signature
from typing import Any

from trainer_files import TRAINER_FILES

import zsim_scenarios
import zsim_topologies
from zsim.backend.backend import Job
from zsim.backend.document import Document, encode, encode_trace
from zsim.cli.check import check
from zsim.cluster.files import Part
from zsim.model.architecture import GPT
from zsim.model.gpt import gpt
from zsim.runtimes.registry import make_schedule
from zsim.strategy.activations import Activations, Checkpointing
from zsim.strategy.optimizer_rule import Adam
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import Train
from zsim_null import NullBackend

Tree = Any
"""What JSON and TOML stand for: dictionaries, lists, and what is in them."""

SMALL = {
    "layers": 2,
    "hidden_size": 16,
    "attention_heads": 2,
    "sequence_length": 16,
    "vocab_size": 32,
}
PLAIN = {
    "title": "a scenario",
    "model": SMALL,
    "cluster": {"topology": "dgx_a100_infiniband"},
    "parallel": {"data": 2},
    "zero": {"stage": 3, "bucket_elements": 1000},
    "train": {"micro_batch_size": 1, "gradient_accumulation_steps": 2, "precision": "bf16"},
}
TROUBLE = [
    {"kind": "gpu", "rank": 1, "factor": 1.5},
    {"kind": "nic", "node": 0, "nic": 1, "dead": True},
    {"kind": "jitter", "deviation": 0.1, "start": "1 us", "end": "1 ms"},
]
NEIGHBOUR = [{"nodes": [0, 1], "bandwidth_per_direction": "10 GB/s"}]
SCENARIOS: tuple[Tree, ...] = (
    PLAIN,
    PLAIN
    | {
        "parallel": {"tensor": 2, "data": 2, "replicate": 2},
        "zero": {"stage": 3, "secondary": 2, "prefetch_units": 2, "gathered_elements": 5000},
        "train": {
            "global_batch_size": 4,
            "micro_batch_size": 1,
            "precision": "fp16",
            "loss_scale": {"initial": 1024.0, "interval": 10},
            "clip_norm": 1.0,
        },
    },
    PLAIN
    | {
        "cluster": {"node": "dgx_h100", "fabric": "rail_optimized", "nodes": 2},
        "parallel": {},
        "network": {"profile": "h100", "algorithm": "tree", "chunks": 2},
        "compute": {"profile": "h100"},
        "fault": TROUBLE,
        "neighbour": NEIGHBOUR,
    },
    PLAIN | {"zero": {"emulate": "fsdp2", "fsdp2": {"reshard_after_forward": False}}},
    PLAIN | {"zero": {"emulate": "fsdp1", "fsdp1": {"sharding_strategy": "shard_grad_op"}}},
    PLAIN
    | {
        "zero": {
            "emulate": "deepspeed",
            "stage": 3,
            "deepspeed": {"reduce_bucket_size": 500, "stage3_prefetch_bucket_size": 100},
        }
    },
    PLAIN | {"zero": {"emulate": "megatron", "megatron": {"overlap_grad_reduce": True}}},
    PLAIN
    | {
        "model": SMALL | {"architecture": "llama", "key_value_heads": 1, "intermediate_size": 20},
        "cluster": {
            "node": "dgx_a100",
            "fabric": "fat_tree_2",
            "nodes": 1,
            "allocator": "expandable",
            "gpu_memory": "1 GB",
            "oversubscription": "3/2",
        },
        "activations": {"checkpointing": "full"},
    },
    PLAIN | {"model": {"parameters": 7.5e4}},
)
CONFIGURATIONS: tuple[Tree, ...] = (
    {
        "model_type": "qwen2",
        "hidden_size": 32,
        "intermediate_size": 64,
        "max_position_embeddings": 128,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "vocab_size": 256,
        "use_sliding_window": False,
        "tie_word_embeddings": True,
    },
    {
        "model_type": "gpt2",
        "n_embd": 32,
        "n_head": 4,
        "n_layer": 2,
        "n_positions": 64,
        "vocab_size": 64,
    },
    {
        "model_type": "gpt_neox",
        "hidden_size": 32,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "max_position_embeddings": 64,
        "vocab_size": 64,
        "use_parallel_residual": True,
        "rotary_pct": 0.25,
    },
    {
        "model_type": "mpt",
        "d_model": 32,
        "n_heads": 4,
        "n_layers": 2,
        "max_seq_len": 64,
        "vocab_size": 64,
        "expansion_ratio": 4,
        "no_bias": True,
        "attn_config": {"alibi": True},
    },
    {
        "model_type": "mistral",
        "hidden_size": 32,
        "intermediate_size": 64,
        "max_position_embeddings": 128,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "sliding_window": 16,
        "vocab_size": 256,
    },
)
CONFIGURED = PLAIN | {"model": {"hf_config": "config.json", "sequence_length": 16}}
DEEPSPEED: tuple[Tree, ...] = (
    {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": "auto",
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95]}},
        "scheduler": {"type": "WarmupLR", "params": {}},
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": True,
            "reduce_bucket_size": 5e6,
            "sub_group_size": "1e9",
            "stage3_prefetch_bucket_size": "auto",
            "offload_param": {"device": "cpu"},
        },
    },
    {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "fp16": {"enabled": True, "initial_scale_power": 12, "hysteresis": 2, "min_loss_scale": 1},
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "eps": 1e-8, "weight_decay": 0.1}},
        "zero_optimization": {"stage": 2, "allgather_bucket_size": 5e8, "overlap_comm": False},
        "activation_checkpointing": {"partition_activations": True},
    },
)
BY_DEEPSPEED = PLAIN | {"zero": {"deepspeed_config": "ds.json"}, "train": {}}
SYSTEMS = ("dgx_a100_infiniband", "dgx_h100_infiniband")
PARTS = ((Part.NODE, "dgx_a100"), (Part.NODE, "gb200_nvl72"), (Part.FABRIC, "fat_tree_2"))
LINKS = """source,target,bandwidth_per_direction,latency
node0,left,100 GB/s,1 us
node1,left,100 GB/s,1 us
left,right,50 GB/s,260 ns
"""
MACHINE = """<system version="1">
 <cpu numaid="0">
  <pci busid="0000:01:00.0" class="0x060400" link_speed="16.0 GT/s PCIe">
   <pci busid="0000:11:00.0" class="0x030200" device="0x20b2" link_speed="16.0 GT/s PCIe"
        link_width="16"><gpu dev="0" sm="80" rank="0" gdr="1">
     <nvlink target="0000:c4:00.0" count="6" tclass="0x068000"/></gpu></pci>
   <pci busid="0000:41:00.0" class="0x020700" link_speed="16.0 GT/s PCIe">
    <nic><net name="mlx5_0" dev="0" speed="200000" port="1" gdr="1"/></nic></pci>
  </pci>
 </cpu>
</system>
"""
AGAINST = "against" in signature(check).parameters
RUN = ("run", "--backend", "null")
COMMANDS = (("check",), ("plan",), RUN, ("run",))


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """A file that is right: its name, its text, the tree it stands for, and who reads it.

    `others` are files beside it that stay as they are. `read` is the file that a command names.
    """

    name: str
    text: str
    tree: Tree
    read: str
    commands: tuple[tuple[str, ...], ...] = COMMANDS
    others: tuple[tuple[str, str], ...] = ()


def toml(value: Tree) -> str:
    """`value` in TOML, where TOML can say it: tables inline."""
    if isinstance(value, dict):
        return (
            "{"
            + ", ".join(f"{json.dumps(key)} = {toml(each)}" for key, each in value.items())
            + "}"
        )
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml, value)) + "]"
    if isinstance(value, float):
        return {"inf": "inf", "-inf": "-inf", "nan": "nan"}.get(str(value), repr(value))
    return json.dumps(value)


def document(tree: Tree) -> str:
    """A TOML file of the tables of `tree`."""
    if not isinstance(tree, dict):
        return toml(tree)
    return "".join(f"{json.dumps(key)} = {toml(value)}\n" for key, value in tree.items())


def _scenario(tree: Tree) -> Base:
    return Base(name="s.toml", text=document(tree), tree=tree, read="s.toml")


def _schedules() -> Iterator[Base]:
    shape = GPT(layers=1, hidden_size=4, attention_heads=1, sequence_length=4, vocab_size=5)
    strategies = (
        Strategy(
            parallel=Parallel(data=2),
            zero=Zero(stage=3),
            activations=Activations(checkpointing=Checkpointing.FULL),
            train=Train(gradient_accumulation_steps=2),
        ),
        Strategy(
            parallel=Parallel(data=2),
            zero=Zero(stage=2),
            train=Train(precision=Precision.FP16, optimizer=Adam(), clip_norm=1.0),
        ),
        Strategy(parallel=Parallel(data=2, replicate=2), zero=Zero(stage=3, bucket_elements=20)),
        Strategy(parallel=Parallel(data=2, tensor=1), zero=Zero(stage=0)),
    )
    cluster = zsim_topologies.load("dgx_a100_infiniband")
    for strategy in strategies:
        model = gpt(shape, micro_batch_size=1, precision=strategy.train.precision)
        made = make_schedule(model, strategy)
        text = encode(Document(schedule=made, model=model, cluster=cluster, steps=2))
        yield Base(name="s.json", text=text, tree=json.loads(text), read="s.json")
        job = Job(schedule=made, model=model, cluster=cluster, steps=1)
        trace = encode_trace(NullBackend().run(job, seed=0))
        if not AGAINST:
            continue
        yield Base(
            name="t.json",
            text=trace,
            tree=json.loads(trace),
            read="s.json",
            others=(("s.json", text),),
            commands=(("check", "--against", "t.json"),),
        )


@cache
def bases() -> tuple[tuple[Base, ...], ...]:
    """Files that are right, by kind; every kind is drawn as often as any other."""
    topology = ("topology", "--nodes", "2")
    shipped = tuple(
        _scenario(tomllib.loads(zsim_scenarios.text(name))) for name in ("tiny", "tiny_llama")
    )
    beside = document(CONFIGURED)
    models = tuple(
        Base(
            name="config.json",
            text=json.dumps(tree, indent=1),
            tree=tree,
            read="s.toml",
            others=(("s.toml", beside),),
        )
        for tree in CONFIGURATIONS
    )
    runtimes = tuple(
        Base(
            name="ds.json",
            text=json.dumps(tree, indent=1),
            tree=tree,
            read="s.toml",
            others=(("s.toml", document(BY_DEEPSPEED)),),
        )
        for tree in DEEPSPEED
    )
    trainers = tuple(
        Base(
            name=name,
            text=document(tree) if name.endswith(".toml") else json.dumps(tree, indent=1),
            tree=tree,
            read="s.toml",
            others=(("s.toml", document(PLAIN | scenario | {"zero": {key: name}})),),
        )
        for key, name, scenario, tree in TRAINER_FILES
    )
    systems = tuple(
        Base(
            name="t.toml", text=text, tree=tomllib.loads(text), read="t.toml", commands=(topology,)
        )
        for text in (zsim_topologies.text(name, Part.SYSTEM) for name in SYSTEMS)
    )
    parts = tuple(
        Base(
            name="p.toml",
            text=text,
            tree=tomllib.loads(text),
            read="p.toml" if part is Part.NODE else "dgx_a100",
            commands=(
                (*topology, "--fabric", "rail_optimized" if part is Part.NODE else "p.toml"),
            ),
        )
        for part, text in ((part, zsim_topologies.text(name, part)) for part, name in PARTS)
    )
    lists = (
        Base(
            name="f.csv",
            text=LINKS,
            tree=None,
            read="dgx_a100",
            commands=((*topology, "--fabric", "f.csv"),),
        ),
        Base(name="m.xml", text=MACHINE, tree=None, read="m.xml", commands=(topology,)),
    )
    scenarios = (*map(_scenario, SCENARIOS), *shipped)
    return scenarios, tuple(_schedules()), models, runtimes + trainers, systems + parts, lists
