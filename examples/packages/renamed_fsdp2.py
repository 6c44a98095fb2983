"""A runtime: FSDP2 under another name, with an option of its own."""

from zsim.runtimes.fsdp2.options import FSDP2
from zsim.runtimes.fsdp2.schedule import schedule
from zsim.runtimes.fsdp2.volume import VOLUME
from zsim.runtimes.runtime import Runtime
from zsim.strategy.config_table import Whole


class Mine(FSDP2):
    """Options of the runtime: those of FSDP2, and one that changes nothing."""

    colour: Whole = 1


RUNTIME = Runtime(options=Mine, schedule=schedule, volume=lambda _: VOLUME)
