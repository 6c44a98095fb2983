"""Scripts that start a setting: bash runs them, with programs that only print their arguments."""

import os
import subprocess
from pathlib import Path

import pytest

from zsim.runtimes.config import ConfigQuestion
from zsim.runtimes.lookup import config_text, runtimes
from zsim_plan.answer.launch_script import SettingLaunch, launch_script

PRINTING = '#!/bin/bash\nprintf \'%s\\n\' "$(basename "$0")" "$@"\n'


def started(folder: Path, asked: SettingLaunch, config: Path) -> list[str]:
    """Return the words of the first command that the script of `config` runs.

    `scontrol` names more nodes than a pipe holds.
    """
    script = asked.path(config)
    script.write_text(launch_script(asked, config), "utf-8")
    programs = folder / "programs"
    programs.mkdir(exist_ok=True)
    for name, text in (
        ("torchrun", PRINTING),
        ("srun", PRINTING),
        ("scontrol", "#!/bin/bash\necho node7\nseq --format 'node%g' 9 20000\n"),
    ):
        (programs / name).write_text(text, "utf-8")
        (programs / name).chmod(0o755)
    environment = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "31",
        "SLURM_JOB_NODELIST": "node[7,9]",
    }
    done = subprocess.run(
        ["bash", script.name],
        cwd=folder,
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout.splitlines()


def launch(runtime: str, gpus: int) -> SettingLaunch:
    return SettingLaunch(name="a setting", runtime=runtime, gpus=gpus, gpus_per_node=8)


@pytest.mark.parametrize("runtime", sorted(runtimes()))
def test_each_runtime_starts_with_its_configuration(runtime: str, tmp_path: Path) -> None:
    config = tmp_path / "a plan.json"
    config.write_text("--one 'two words' \\\n--three\n", "utf-8")
    words = started(tmp_path, launch(runtime, 4), config)
    assert words[:3] == ["torchrun", "--standalone", "--nproc-per-node=4"]
    assert words[3].endswith(".py")
    assert words[4:] in (
        [],  # code that the program has
        ["--deepspeed_config", "a plan.json"],
        ["--config-file", "a plan.json"],
        ["--one", "two words", "--three"],
    )


def test_slurm_starts_one_torchrun_on_each_node_that_meet_on_the_first(tmp_path: Path) -> None:
    config = tmp_path / "plan.toml"
    words = started(tmp_path, launch("fsdp2", 16), config)
    assert words == [
        "srun",
        "torchrun",
        "--nnodes=2",
        "--nproc-per-node=8",
        "--rdzv-backend=c10d",
        "--rdzv-id=31",
        "--rdzv-endpoint=node7:29500",
        "-m",
        "torchtitan.train",
        "--job.config_file",
        "plan.toml",
    ]
    text = (tmp_path / "plan.sbatch").read_text("utf-8").splitlines()
    asked = [line for line in text if line.startswith("#SBATCH")]
    assert text[1 : 1 + len(asked)] == asked  # Slurm reads them only before the first command
    assert {"#SBATCH --nodes=2", "#SBATCH --gpus-per-node=8"} <= {*asked}


def test_arguments_arrive_as_they_were_written(tmp_path: Path) -> None:
    layout = "E|t*3|(t|)*2,L"
    asked = ConfigQuestion(
        changes={
            "zero.emulate": "megatron",
            "zero.stage": 1,
            "activations.checkpointing": "full",
            "zero.megatron.pipeline_model_parallel_layout": layout,
        },
        precision="bf16",
        sequences=64,
        sequence_length=4096,
    )
    config = tmp_path / "arguments.txt"
    config.write_text(config_text(asked), "utf-8")
    words = started(tmp_path, launch("megatron", 8), config)
    assert words[words.index("--pipeline-model-parallel-layout") + 1] == layout
    assert words[words.index("--global-batch-size") + 1] == "64"
    assert "\\" not in words


def test_a_script_never_replaces_its_configuration(tmp_path: Path) -> None:
    for name in ("plan.sh", "plan.sbatch", "plan.py", "plan"):
        for gpus in (8, 16):
            assert launch("fsdp2", gpus).path(tmp_path / name) != tmp_path / name


def test_a_job_on_several_racks_asks_slurm_for_equal_segments(tmp_path: Path) -> None:
    """Else Slurm may take 18 trays of one rack and 14 of the next."""
    racks = SettingLaunch(
        name="racks", runtime="fsdp2", gpus=128, gpus_per_node=4, nodes_per_domain=16
    )
    assert "#SBATCH --segment=16" in launch_script(racks, tmp_path / "plan.py")
    assert "--segment" not in launch_script(launch("fsdp2", 16), tmp_path / "plan.py")


def test_segments_that_expand_are_asked_of_the_allocator(tmp_path: Path) -> None:
    config = tmp_path / "plan.py"
    plain = SettingLaunch(name="plain", runtime="fsdp2", gpus=8, gpus_per_node=8)
    expandable = SettingLaunch(
        name="expandable", runtime="fsdp2", gpus=8, gpus_per_node=8, is_expandable=True
    )
    assert "expandable_segments:True" not in launch_script(plain, config)
    assert "expandable_segments:True" in launch_script(expandable, config)
