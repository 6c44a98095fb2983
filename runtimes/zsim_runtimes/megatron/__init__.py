"""Megatron-LM with and without its distributed optimizer, with and without a pipeline."""

from zsim.runtimes.config import Config
from zsim.runtimes.runtime import Runtime
from zsim_runtimes.megatron.options import Megatron

RUNTIME = Runtime(
    options=Megatron,
    schedule="zsim_runtimes.megatron.dispatch:schedule",
    volume="zsim_runtimes.megatron.dispatch:volume",
    need="zsim_runtimes.megatron.dispatch:need",
    pace="zsim_runtimes.megatron.pipeline:pace",
    search="zsim_runtimes.megatron.search:SEARCH",
    config=Config(
        readers={
            "megatron_arguments": "zsim_runtimes.megatron.arguments_reader:read",
            "nemo_config": "zsim_runtimes.megatron.nemo_reader:read",
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
        write="zsim_runtimes.megatron.config_writer:write",
        before='eval "arguments=($(cat {file}))"',
        start='pretrain_gpt.py "${{arguments[@]}}"',
    ),
    host_costs="zsim_runtimes.megatron:host_costs.toml",
)
