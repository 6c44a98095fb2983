"""PyTorch's FSDP2, with and without a pipeline."""

from zsim.runtimes.fsdp2.options import FSDP2
from zsim.runtimes.registry import Runtime

RUNTIME = Runtime(
    options=FSDP2,
    schedule="zsim.runtimes.fsdp2.dispatch:schedule",
    volume="zsim.runtimes.fsdp2.dispatch:volume",
    need="zsim.runtimes.fsdp2.dispatch:need",
    search="zsim.runtimes.fsdp2.search:SEARCH",
)
