"""A runtime: FSDP2 under another name, with everything that a runtime may have."""

from mine_runtime.options import Mine
from zsim.runtimes.config import Config
from zsim.runtimes.runtime import Runtime

RUNTIME = Runtime(
    options=Mine,
    schedule="zsim_runtimes.fsdp2.dispatch:schedule",
    volume="zsim_runtimes.fsdp2.dispatch:volume",
    search="mine_runtime.search:SEARCH",
    config=Config(
        readers={"mine_file": "mine_runtime.config:read"}, write="mine_runtime.config:write"
    ),
    host_costs="mine_runtime:host_costs.toml",
)
