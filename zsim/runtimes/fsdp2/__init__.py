"""PyTorch's FSDP2."""

from zsim.runtimes.fsdp2.options import FSDP2
from zsim.runtimes.fsdp2.schedule import schedule
from zsim.runtimes.fsdp2.volume import VOLUME
from zsim.runtimes.registry import Runtime

RUNTIME = Runtime(options=FSDP2, schedule=schedule, volume=lambda _: VOLUME)
