"""What `aio` of a ds_config.json says is how files are read and written."""

import json

from zsim.runtimes.deepspeed.options import DeepSpeed
from zsim.scenario.deepspeed_config import configured
from zsim.scenario.runtime_tables import emulated
from zsim.scenario.toml import parse
from zsim.strategy.offload import FileAccess

TEXT = """
title = "from a configuration"
[model]
parameters = 1000
[cluster]
topology = "dgx_h100_infiniband"
[zero]
deepspeed_config = "ds_config.json"
[train]
"""


def test_handles_of_files_are_read_and_what_is_not_modelled_of_them_is_named() -> None:
    plain = {"block_size": 1048576, "queue_depth": 8, "intra_op_parallelism": 1}
    plain |= {"single_submit": False, "overlap_events": True}
    config = {"zero_optimization": {"stage": 3}, "aio": plain}
    assert configured(parse(TEXT), json.dumps(config))[1] == ()
    tuned = {"block_size": 2097152, "queue_depth": 32, "thread_count": 4, "overlap_events": False}
    others = {"single_submit": True, "use_gds": True}
    scenario, said = configured(
        parse(TEXT), json.dumps({"zero_optimization": {"stage": 3}, "aio": tuned | others})
    )
    assert set(said) == {f"aio.{key}" for key in others}
    options = emulated(scenario.zero)
    assert isinstance(options, DeepSpeed)
    assert options.file_access == FileAccess(
        block_bytes=2097152, queue_depth=32, threads=4, waves=True
    )
    assert (options.least_file_bytes, options.file_alignment) == (2097152, 1024)


def test_handles_of_files_are_for_stage_3() -> None:
    config = {"zero_optimization": {"stage": 1}, "aio": {"queue_depth": 32}}
    scenario, said = configured(parse(TEXT), json.dumps(config))
    options = emulated(scenario.zero)
    assert isinstance(options, DeepSpeed)
    assert (options.aio.queue_depth, said) == (8, ())
