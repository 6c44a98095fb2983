"""PyTorch's DistributedDataParallel."""

from zsim.runtimes.config import Config
from zsim.runtimes.runtime import Runtime
from zsim_runtimes.ddp.options import DDP

RUNTIME = Runtime(
    options=DDP,
    schedule="zsim_runtimes.ddp.schedule:schedule",
    volume="zsim_runtimes.ddp.volume:volume",
    need="zsim_runtimes.ddp.schedule:need",
    search="zsim_runtimes.ddp.search:SEARCH",
    config=Config(
        readers={"litgpt_config": "zsim_runtimes.ddp.litgpt_reader:read"},
        marks={"litgpt_config": (("checkpoint_dir:", "train:"), ("model_name:", "train:"))},
        write="zsim_runtimes.ddp.config_writer:write",
    ),
)
