"""PyTorch's FSDP2, with and without a pipeline."""

from zsim.runtimes.config import Config, ProgramFile
from zsim.runtimes.runtime import Runtime
from zsim_runtimes.fsdp2.options import FSDP2

RUNTIME = Runtime(
    options=FSDP2,
    schedule="zsim_runtimes.fsdp2.dispatch:schedule",
    volume="zsim_runtimes.fsdp2.dispatch:volume",
    need="zsim_runtimes.fsdp2.dispatch:need",
    search="zsim_runtimes.fsdp2.search:SEARCH",
    config=Config(
        readers={
            "accelerate_config": "zsim_runtimes.fsdp2.accelerate_reader:read",
            "axolotl_config": "zsim_runtimes.fsdp2.axolotl_reader:read",
            "torchtitan_config": "zsim_runtimes.fsdp2.torchtitan_reader:read",
        },
        marks={
            "accelerate_config": (("distributed_type:",), ("compute_environment:",)),
            "axolotl_config": (("base_model:", "micro_batch_size:"),),
            "torchtitan_config": (
                ("[training]", "local_batch_size"),
                ("[model]", "flavor"),
                ("from torchtitan",),
            ),
        },
        write="zsim_runtimes.fsdp2.config_writer:write",
        kinds=(
            ProgramFile(
                suffix=".toml",
                program="torchtitan",
                write="zsim_runtimes.fsdp2.torchtitan_writer:write",
                start="-m torchtitan.train --job.config_file {file}",
            ),
        ),
    ),
)
