"""In which number formats a strategy has gradients reduced, accumulated and applied.

Exact numbers cannot tell formats apart, so they are compared with what the strategy says.
"""

from zsim.strategy.runtime_options import Formats, RuntimeOptions
from zsim.strategy.strategy import Strategy


def formats(strategy: Strategy) -> Formats:
    """Return the formats of a strategy: zsim's own stages keep that of forward and backward."""
    runtime = strategy.zero.emulate or RuntimeOptions()
    precision = strategy.train.precision
    return runtime.formats(
        stage=strategy.zero.stage, compute=precision.compute, optimizer=precision.optimizer
    )
