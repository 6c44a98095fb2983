"""PyTorch's FSDP2."""

from zsim.closed_form.fsdp2 import VOLUME
from zsim.runtime.fsdp2 import FSDP2
from zsim.runtimes.registry import Runtime
from zsim.zero.emulate.fsdp2 import schedule

RUNTIME = Runtime(options=FSDP2, schedule=schedule, volume=lambda _: VOLUME)
