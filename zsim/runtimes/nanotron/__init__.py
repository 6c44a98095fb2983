"""nanotron, with and without a pipeline."""

from zsim.runtimes.nanotron.options import Nanotron
from zsim.runtimes.registry import Runtime

RUNTIME = Runtime(
    options=Nanotron,
    schedule="zsim.runtimes.nanotron.dispatch:schedule",
    volume="zsim.runtimes.nanotron.dispatch:volume",
    search="zsim.runtimes.nanotron.search:SEARCH",
)
