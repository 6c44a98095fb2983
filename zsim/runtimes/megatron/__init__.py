"""Megatron-LM with and without its distributed optimizer, with and without a pipeline."""

from zsim.runtimes.megatron.options import Megatron
from zsim.runtimes.registry import Runtime

RUNTIME = Runtime(
    options=Megatron,
    schedule="zsim.runtimes.megatron.dispatch:schedule",
    volume="zsim.runtimes.megatron.dispatch:volume",
    need="zsim.runtimes.megatron.dispatch:need",
    search="zsim.runtimes.megatron.search:SEARCH",
)
