"""PyTorch's first FSDP."""

from zsim.runtimes.config import Config
from zsim.runtimes.runtime import Runtime
from zsim_runtimes.fsdp1.options import FSDP1

RUNTIME = Runtime(
    options=FSDP1,
    schedule="zsim_runtimes.fsdp1.schedule:schedule",
    volume="zsim_runtimes.fsdp1.volume:volume",
    search="zsim_runtimes.fsdp1.search:SEARCH",
    config=Config(
        readers={"foundry_config": "zsim_runtimes.fsdp1.foundry_reader:read"},
        marks={
            "foundry_config": (("global_train_batch_size:",), ("device_train_microbatch_size:",))
        },
        write="zsim_runtimes.fsdp1.config_writer:write",
    ),
)
