"""Options of the runtime."""

from zsim.strategy.config_table import Whole
from zsim_runtimes.fsdp2.options import FSDP2


class Mine(FSDP2):
    """Options of FSDP2, and one that changes nothing; no pipeline."""

    has_pipeline = False
    colour: Whole = 1
