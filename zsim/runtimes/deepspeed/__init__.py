"""DeepSpeed's ZeRO stages 1 to 3."""

from zsim.runtimes.deepspeed.options import DeepSpeed
from zsim.runtimes.registry import Runtime

RUNTIME = Runtime(
    options=DeepSpeed,
    schedule="zsim.runtimes.deepspeed.dispatch:schedule",
    volume="zsim.runtimes.deepspeed.dispatch:volume",
    search="zsim.runtimes.deepspeed.search:SEARCH",
)
