"""nanotron, with and without a pipeline."""

from zsim.runtimes.config import Config
from zsim.runtimes.runtime import Runtime
from zsim_runtimes.nanotron.options import Nanotron

RUNTIME = Runtime(
    options=Nanotron,
    schedule="zsim_runtimes.nanotron.dispatch:schedule",
    volume="zsim_runtimes.nanotron.dispatch:volume",
    search="zsim_runtimes.nanotron.search:SEARCH",
    config=Config(
        readers={"nanotron_config": "zsim_runtimes.nanotron.config_reader:read"},
        marks={"nanotron_config": (("parallelism:", "tokens:", "model_config:"),)},
        write="zsim_runtimes.nanotron.config_writer:write",
        start="run_train.py --config-file {file}",
    ),
    host_costs="zsim_runtimes.nanotron:host_costs.toml",
)
