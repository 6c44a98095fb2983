"""Sections of offloading in a ds_config.json: those of today, and the flags of old."""

import json
from functools import partial

import pytest
from read_deepspeed_config import TEXT

from zsim.scenario import trainer_files
from zsim.scenario.runtime_tables import emulated
from zsim.scenario.tables import Scenario, ScenarioError
from zsim.scenario.toml import parse
from zsim.strategy.offload import FileAccess
from zsim_runtimes.deepspeed.options import (
    DeepSpeed,
    OffloadDevice,
    OffloadOptimizer,
    OffloadParam,
)

configured = partial(trainer_files.configured, key="deepspeed_config")


def taken(stage: int, **options: object) -> tuple[Scenario, tuple[str, ...]]:
    """The scenario and what is not modelled of these options of `zero_optimization`."""
    config = {"zero_optimization": {"stage": stage, **options}}
    return configured(parse(TEXT, ()), json.dumps(config))[:2]


def test_sections_of_offloading_are_those_of_the_runtime() -> None:
    sections = {
        "offload_optimizer": {
            "device": "NVMe",
            "nvme_path": "/local_nvme",
            "buffer_count": "8",
            "pin_memory": True,
            "pipeline_read": True,
            "fast_init": False,
            "ratio": 1.0,
        },
        "offload_param": {"device": "cpu", "max_in_cpu": 1e6, "pin_memory": False},
    }
    scenario, named = taken(3, **sections)
    assert emulated(scenario.zero) == DeepSpeed(
        offload_optimizer=OffloadOptimizer(
            device=OffloadDevice.NVME, buffer_count=8, pipeline_read=True
        ),
        offload_param=OffloadParam(device=OffloadDevice.CPU, max_in_cpu=1_000_000),
    )
    assert named == ()


def test_the_old_flag_of_offloading_is_the_section_that_replaced_it() -> None:
    cpu = OffloadOptimizer(device=OffloadDevice.CPU)
    scenario, _ = taken(2, cpu_offload=True, cpu_offload_param=True)
    assert emulated(scenario.zero) == DeepSpeed(offload_optimizer=cpu)  # parameters are for stage 3
    assert emulated(taken(2, cpu_offload=False)[0].zero) == DeepSpeed()


def test_handles_of_files_are_read_and_what_is_not_modelled_of_them_is_refused() -> None:
    plain = {"block_size": 1048576, "queue_depth": 8, "intra_op_parallelism": 1}
    plain |= {"single_submit": False, "overlap_events": True}
    config = {"zero_optimization": {"stage": 3}, "aio": plain}
    assert configured(parse(TEXT), json.dumps(config))[1] == ()
    tuned = {"block_size": 2097152, "queue_depth": 32, "thread_count": 4, "overlap_events": False}
    for other in ("single_submit", "use_gds"):
        wrong = {"zero_optimization": {"stage": 3}, "aio": tuned | {other: True}}
        with pytest.raises(ScenarioError, match=rf"aio\.{other}: true is not modelled"):
            configured(parse(TEXT), json.dumps(wrong))
    scenario, *_ = configured(
        parse(TEXT), json.dumps({"zero_optimization": {"stage": 3}, "aio": tuned})
    )
    options = emulated(scenario.zero)
    assert isinstance(options, DeepSpeed)
    assert options.file_access == FileAccess(
        block_bytes=2097152, queue_depth=32, threads=4, waves=True
    )
    assert (options.least_file_bytes, options.file_alignment) == (2097152, 1024)


def test_handles_of_files_are_for_stage_3() -> None:
    config = {"zero_optimization": {"stage": 1}, "aio": {"queue_depth": 32}}
    scenario, said, *_ = configured(parse(TEXT), json.dumps(config))
    options = emulated(scenario.zero)
    assert isinstance(options, DeepSpeed)
    assert (options.aio.queue_depth, said) == (8, ())
