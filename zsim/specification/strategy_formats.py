"""Number formats in which a strategy reduces, accumulates and applies gradients.

Exact numbers cannot distinguish formats, so formats are compared with the strategy's.
"""

from dataclasses import replace

from zsim.strategy.runtime_options import Formats, RuntimeOptions
from zsim.strategy.strategy import Strategy


def formats(strategy: Strategy) -> Formats:
    """Return the formats of a strategy: zsim's own stages keep that of forward and backward."""
    runtime = strategy.zero.emulate or RuntimeOptions()
    precision = strategy.train.precision
    found = runtime.formats(
        stage=strategy.zero.stage, compute=precision.compute, optimizer=precision.optimizer
    )
    kept = strategy.kept_formats
    least = min(kept.moments, key=lambda each: each.size_bytes, default=None)
    return replace(found, applied=kept.gradient, master=kept.master, moment=least)
