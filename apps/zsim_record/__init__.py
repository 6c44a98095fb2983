"""Record training scripts without a GPU, and measure machines: `zsim record`, `zsim measure`.

In Python: `zsim_record.recording` records the calls inside a `with` block.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zsim_record.record.recording import recording as recording


def __getattr__(name: str) -> object:
    """Import the recorder on first use: it imports torch."""
    if name != "recording":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module("zsim_record.record.recording").recording
