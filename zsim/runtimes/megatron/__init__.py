"""Megatron-LM with and without its distributed optimizer, with and without a pipeline."""

from zsim.runtimes.config import Config
from zsim.runtimes.megatron.options import Megatron
from zsim.runtimes.runtime import Runtime

RUNTIME = Runtime(
    options=Megatron,
    schedule="zsim.runtimes.megatron.dispatch:schedule",
    volume="zsim.runtimes.megatron.dispatch:volume",
    need="zsim.runtimes.megatron.dispatch:need",
    search="zsim.runtimes.megatron.search:SEARCH",
    config=Config(
        readers={
            "megatron_arguments": "zsim.runtimes.megatron.arguments_reader:read",
            "nemo_config": "zsim.runtimes.megatron.nemo_reader:read",
        },
        marks={
            "nemo_config": (
                ("encoder_seq_length:",),
                ("trainer:", "model:", "num_layers"),
                ("nemo.collections",),
            ),
            "megatron_arguments": (
                ("--num-layers", "--hidden-size"),
                ("--num-layers", "pretrain_"),
            ),
        },
        write="zsim.runtimes.megatron.config_writer:write",
    ),
    host_costs="zsim.runtimes.megatron:host_costs.toml",
)
