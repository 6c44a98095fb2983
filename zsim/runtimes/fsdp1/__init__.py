"""PyTorch's first FSDP."""

from zsim.runtimes.config import Config
from zsim.runtimes.fsdp1.options import FSDP1
from zsim.runtimes.runtime import Runtime

RUNTIME = Runtime(
    options=FSDP1,
    schedule="zsim.runtimes.fsdp1.schedule:schedule",
    volume="zsim.runtimes.fsdp1.volume:volume",
    search="zsim.runtimes.fsdp1.search:SEARCH",
    config=Config(
        readers={"foundry_config": "zsim.runtimes.fsdp1.foundry_reader:read"},
        marks={
            "foundry_config": (("global_train_batch_size:",), ("device_train_microbatch_size:",))
        },
        write="zsim.runtimes.fsdp1.config_writer:write",
    ),
)
