"""PyTorch's first FSDP."""

from zsim.closed_form.fsdp1 import VOLUME
from zsim.runtime.fsdp1 import FSDP1
from zsim.runtimes.registry import Runtime
from zsim.zero.emulate.fsdp1 import schedule

RUNTIME = Runtime(options=FSDP1, schedule=schedule, volume=lambda _: VOLUME)
