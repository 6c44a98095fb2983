"""Jobs on which the executor is judged: every stage and runtime, small enough to be recorded."""

from zsim.backend.backend import Job
from zsim.cluster.cluster import Cluster, Gpu, Link
from zsim.model.architecture import GPT
from zsim.model.gpt import gpt
from zsim.runtimes.registry import make_schedule
from zsim.strategy.strategy import Strategy
from zsim_runtimes.fsdp1.options import FSDP1
from zsim_runtimes.fsdp2.options import FSDP2

CLUSTER = Cluster(
    name="none",
    nodes=1,
    gpus_per_node=4,
    gpu=Gpu(name="none", memory_bytes=1, memory_bytes_per_s=1, rates=()),
    switch_link=Link(bytes_per_s=1),
    nics_per_node=1,
    nic_link=Link(bytes_per_s=1),
)
SHAPE = GPT(layers=2, hidden_size=16, attention_heads=2, sequence_length=8, vocab_size=256)


TRAINING: dict[str, object] = {"parallel.data": 4, "train.gradient_accumulation_steps": 2}
OWN: dict[str, object] = {**TRAINING, "zero.bucket_elements": 2000, "train.clip_norm": 1.0}
VARIANTS: dict[str, dict[str, object]] = {
    "": {},
    "bf16": {"train.precision": "bf16"},
    "fp16": {"train.precision": "fp16"},
    "one micro-batch": {"train.gradient_accumulation_steps": 1, "train.clip_norm": None},
    "replicas": {"parallel.data": 2, "parallel.replicate": 2},
    "checkpoints": {"activations.checkpointing": "full"},
    "offload": {"offload.optimizer": "host"},
}
RUNTIMES = {
    "fsdp1": FSDP1(),
    "fsdp2": FSDP2(),
    "fsdp2, never resharded": FSDP2(reshard_after_forward=False),
}
CONFIGURATIONS: dict[str, dict[str, object]] = {
    **{
        f"stage {stage} {name}".strip(): {**OWN, "zero.stage": stage, **changes}
        for stage in range(4)
        for name, changes in VARIANTS.items()
        if stage or name != "offload"
    },
    **{
        name: {**TRAINING, "zero.stage": 3, "zero.emulate": options}
        for name, options in RUNTIMES.items()
    },
}


def job(name: str) -> Job:
    given = {key: value for key, value in CONFIGURATIONS[name].items() if value is not None}
    strategy = Strategy.of(given)
    model = gpt(SHAPE, micro_batch_size=2, precision=strategy.train.precision)
    return Job(schedule=make_schedule(model, strategy), model=model, cluster=CLUSTER, steps=2)
