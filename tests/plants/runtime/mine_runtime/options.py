"""Options of the runtime."""

from zsim.runtimes.fsdp2.options import FSDP2
from zsim.strategy.config_table import Whole


class Mine(FSDP2):
    """Options of FSDP2, and one that changes nothing; no pipeline."""

    has_pipeline = False
    colour: Whole = 1
