"""What forward keeps for backward: all, a part, or the inputs of blocks alone."""

from enum import StrEnum

from pydantic import model_validator

from zsim.config_error import refusal, refuse
from zsim.strategy.config_table import Count, Flag, Table


class Checkpointing(StrEnum):
    """Activations that are kept for backward.

    FULL: of a block, its input alone. SELECTIVE: all but the softmax of plain attention's scores,
    which the module itself makes again (Korthikanti et al. 2022, section 5): the schedule runs
    nothing twice. OPERATIONS: results of attention and of every second matrix product; the module
    makes the rest again.
    """

    NONE = "none"
    SELECTIVE = "selective"
    OPERATIONS = "operations"
    FULL = "full"


class Activations(Table):
    """`[activations]`: what forward keeps for backward.

    Attributes:
        checkpointing: which activations are kept.
        partition: keep a rank's share of each checkpoint and gather it over the tensor axis before
            recompute (ZeRO-R Pa, section 6.1).
        every_nth: with full checkpointing, of so many blocks in a row the last alone is
            checkpointed (torchtitan's `selective_ac_option` as a number).
        early_stop: a block that is run again stops when all is there that backward reads (see
            `zsim.strategy.execution`).
    """

    checkpointing: Checkpointing = Checkpointing.NONE
    partition: Flag = False
    every_nth: Count = 1
    early_stop: Flag = False

    @model_validator(mode="before")
    @classmethod
    def _refuse_offload(cls, given: object) -> object:
        """Say where a key went that was here."""
        if isinstance(given, dict) and "offload" in given:
            why = "is not here any more: say offload.checkpoints = host"
            refuse([refusal("offload", None, why)])
        return given
