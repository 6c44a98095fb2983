"""PyTorch's first FSDP."""

from zsim.runtimes.fsdp1.options import FSDP1
from zsim.runtimes.fsdp1.schedule import schedule
from zsim.runtimes.fsdp1.volume import VOLUME
from zsim.runtimes.registry import Runtime

RUNTIME = Runtime(options=FSDP1, schedule=schedule, volume=lambda _: VOLUME)
