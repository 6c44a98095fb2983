"""PyTorch's DistributedDataParallel."""

from zsim.runtimes.config import Config
from zsim.runtimes.ddp.options import DDP
from zsim.runtimes.runtime import Runtime

RUNTIME = Runtime(
    options=DDP,
    schedule="zsim.runtimes.ddp.schedule:schedule",
    volume="zsim.runtimes.ddp.volume:volume",
    need="zsim.runtimes.ddp.schedule:need",
    search="zsim.runtimes.ddp.search:SEARCH",
    config=Config(write="zsim.runtimes.ddp.config_writer:write"),
)
