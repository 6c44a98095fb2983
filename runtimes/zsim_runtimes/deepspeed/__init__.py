"""DeepSpeed's ZeRO stages 1 to 3, and stage 0 without ZeRO."""

from zsim.runtimes.config import Config
from zsim.runtimes.runtime import Runtime
from zsim_runtimes.deepspeed.options import DeepSpeed

RUNTIME = Runtime(
    options=DeepSpeed,
    schedule="zsim_runtimes.deepspeed.dispatch:schedule",
    volume="zsim_runtimes.deepspeed.dispatch:volume",
    need="zsim_runtimes.deepspeed.dispatch:need",
    search="zsim_runtimes.deepspeed.search:SEARCH",
    config=Config(
        readers={"deepspeed_config": "zsim_runtimes.deepspeed.config_reader:read"},
        marks={
            "deepspeed_config": (
                ('"zero_optimization"',),
                ('"train_micro_batch_size_per_gpu"',),
                ('"train_batch_size"',),
            )
        },
        write="zsim_runtimes.deepspeed.config_writer:write",
        start="train.py --deepspeed_config {file}",
    ),
)
