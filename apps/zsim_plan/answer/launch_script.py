"""Script that starts the training of a setting: torchrun on one node, Slurm on several."""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from zsim.runtimes.lookup import start_of

TORCHRUN, SLURM = ".sh", ".sbatch"
"""Suffixes of the scripts."""

PORT: Final = 29_500
"""Port of the first node on which ranks meet; torchrun's default."""

EXPANDABLE: Final = "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingLaunch:
    """A setting to start.

    Attributes:
        name: description of the setting.
        runtime: name of its runtime.
        gpus: number of GPUs.
        gpus_per_node: GPUs of a node.
        nodes_per_domain: nodes that the job uses of each NVSwitch domain.
        is_expandable: True if the allocator has expandable segments.
    """

    name: str
    runtime: str
    gpus: int
    gpus_per_node: int
    nodes_per_domain: int = 1
    is_expandable: bool = False

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return -(-self.gpus // self.gpus_per_node)

    def path(self, config: Path) -> Path:
        """Return the path of the script of a configuration file: the same with another suffix."""
        suffix = SLURM if self.nodes > 1 else TORCHRUN
        if config.suffix == suffix:
            return config.with_name(f"{config.stem}.launch{suffix}")
        return config.with_suffix(suffix)


def launch_script(asked: SettingLaunch, config: Path) -> str:
    """Return the script that starts a setting whose configuration is `config`.

    The script runs in the folder of `config`, which also has the user's program.
    """
    before, start = start_of(asked.runtime, suffix=config.suffix)
    file = shlex.quote(config.name)
    per_node = min(asked.gpus, asked.gpus_per_node)
    segment = min(asked.nodes, asked.nodes_per_domain)
    lines = ["#!/bin/bash"]
    if asked.nodes > 1:
        lines += [
            f"#SBATCH --nodes={asked.nodes}",
            "#SBATCH --ntasks-per-node=1",
            f"#SBATCH --gpus-per-node={per_node}",
            # nodes of one block of Slurm's topology/block plugin
            *[f"#SBATCH --segment={segment}"] * (segment > 1),
            "#SBATCH --exclusive",
            "#SBATCH --requeue",
        ]
    kind = "sbatch" if asked.nodes > 1 else "bash"
    lines += [
        f"# {asked.name}",
        f"# {kind} {shlex.quote(asked.path(config).name)}, in the folder of {config.name} and of "
        "the program that trains.",
        "set -euo pipefail",
    ]
    lines += [EXPANDABLE] * asked.is_expandable
    lines += [before.format(file=file)] if before else []
    if asked.nodes > 1:
        lines += [
            # `head -n 1` would end scontrol by a signal, and with pipefail the script
            'names=$(scontrol show hostnames "$SLURM_JOB_NODELIST")',
            "first=${names%%$'\\n'*}",
            f"srun torchrun --nnodes={asked.nodes} --nproc-per-node={per_node} \\",
            f'  --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint="$first:{PORT}" \\',
        ]
    else:
        lines.append(f"torchrun --standalone --nproc-per-node={per_node} \\")
    return "\n".join([*lines, f"  {start.format(file=file)}", ""])
