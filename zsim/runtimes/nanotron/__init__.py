"""nanotron, with and without a pipeline."""

from zsim.runtimes.config import Config
from zsim.runtimes.nanotron.options import Nanotron
from zsim.runtimes.runtime import Runtime

RUNTIME = Runtime(
    options=Nanotron,
    schedule="zsim.runtimes.nanotron.dispatch:schedule",
    volume="zsim.runtimes.nanotron.dispatch:volume",
    search="zsim.runtimes.nanotron.search:SEARCH",
    config=Config(
        readers={"nanotron_config": "zsim.runtimes.nanotron.config_reader:read"},
        marks={"nanotron_config": (("parallelism:", "tokens:", "model_config:"),)},
        write="zsim.runtimes.nanotron.config_writer:write",
    ),
    host_costs="zsim.runtimes.nanotron:host_costs.toml",
)
