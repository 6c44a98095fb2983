"""Values of options of a DeepSpeed configuration: formats and devices.

Each function raises ValueError with the allowed values.
"""

from zsim.runtimes.trainer_files.option_values import read_whole
from zsim_runtimes.deepspeed.options import OffloadDevice


def read_at_least_one(value: object) -> int:
    """Return a whole number, with 0 as 1, which DeepSpeed treats equally."""
    return max(1, read_whole(value))


def read_format(value: object) -> str:
    """Return the name of a format."""
    found = value.lower() if isinstance(value, str) else ""
    if found not in {"fp16", "bf16", "fp32"}:
        raise ValueError('must be "fp16", "bf16" or "fp32"')
    return found


def read_device(value: object) -> str:
    """Return the device of an offload section."""
    found = value.lower() if isinstance(value, str) else ""
    if found not in list(OffloadDevice):
        raise ValueError('must be "none", "cpu" or "nvme"')
    return found
