"""Activations kept from forward to backward: all, some, or only the inputs of blocks."""

from enum import StrEnum

from pydantic import model_validator

from zsim.config_error import refusal, refuse
from zsim.strategy.config_table import Count, Flag, Table


class Checkpointing(StrEnum):
    """Activations that are kept for backward.

    FULL: only the input of each block. SELECTIVE: all but the softmax of plain attention's scores,
    which the module recomputes (Korthikanti et al. 2022, section 5); the schedule runs nothing
    twice. OPERATIONS: outputs of attention and of every second matrix multiplication; the module
    recomputes the rest.
    """

    NONE = "none"
    SELECTIVE = "selective"
    OPERATIONS = "operations"
    FULL = "full"


class Activations(Table):
    """`[activations]`: activations kept from forward to backward.

    Attributes:
        checkpointing: which activations are kept.
        partition: keep a rank's share of each checkpoint and gather it over the tensor axis before
            recompute (ZeRO-R Pa, section 6.1).
        every_nth: with full checkpointing, checkpoint only every n-th block (torchtitan's
            `selective_ac_option` as a number).
        early_stop: recompute of a block stops as soon as backward's inputs exist (see
            `zsim.strategy.execution`).
    """

    checkpointing: Checkpointing = Checkpointing.NONE
    partition: Flag = False
    every_nth: Count = 1
    early_stop: Flag = False

    @model_validator(mode="before")
    @classmethod
    def _refuse_offload(cls, given: object) -> object:
        """Report the new key of an option that has moved."""
        if isinstance(given, dict) and "offload" in given:
            why = "is not here any more: say offload.checkpoints = host"
            refuse([refusal("offload", None, why)])
        return given
