"""Megatron-LM's distributed optimizer."""

from zsim.runtimes.megatron.options import Megatron
from zsim.runtimes.megatron.schedule import schedule
from zsim.runtimes.megatron.volume import VOLUME
from zsim.runtimes.registry import Runtime

RUNTIME = Runtime(options=Megatron, schedule=schedule, volume=lambda _: VOLUME)
