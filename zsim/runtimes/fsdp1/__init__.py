"""PyTorch's first FSDP."""

from zsim.runtimes.fsdp1.options import FSDP1
from zsim.runtimes.registry import Runtime

RUNTIME = Runtime(
    options=FSDP1,
    schedule="zsim.runtimes.fsdp1.schedule:schedule",
    volume="zsim.runtimes.fsdp1.volume:volume",
    search="zsim.runtimes.fsdp1.search:SEARCH",
)
