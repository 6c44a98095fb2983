"""Megatron-LM's distributed optimizer."""

from zsim.closed_form.megatron import VOLUME
from zsim.runtime.megatron import Megatron
from zsim.runtimes.registry import Runtime
from zsim.zero.emulate.megatron import schedule

RUNTIME = Runtime(options=Megatron, schedule=schedule, volume=lambda _: VOLUME)
