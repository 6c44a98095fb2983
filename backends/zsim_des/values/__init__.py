"""Exact values in a simulated run: the same schedule, with the numbers that it computes."""

from zsim.backend.values import Seat, Values
from zsim_des.values.carried_run import carry
from zsim_des.values.carrier import Carrier
from zsim_des.values.marks import unseen
from zsim_des.values.modular import Modular
from zsim_des.values.plain import PlainState, train
from zsim_des.values.planted import Planted, plantable
from zsim_des.values.running import Fault
from zsim_des.values.trained import Result, train_by_schedule

__all__ = [
    "Carrier",
    "Fault",
    "Modular",
    "PlainState",
    "Planted",
    "Result",
    "Seat",
    "Values",
    "carry",
    "plantable",
    "train",
    "train_by_schedule",
    "unseen",
]
