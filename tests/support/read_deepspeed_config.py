"""A scenario that takes a configuration of DeepSpeed, and nothing else of its own."""

import json
from functools import partial

from zsim.scenario import trainer_files
from zsim.scenario.tables import Scenario
from zsim.scenario.toml import parse

configured = partial(trainer_files.configured, key="deepspeed_config")

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

Config = dict[str, object]


def read(config: Config, *settings: str) -> Scenario:
    """Return the scenario with `config` and the `settings` of a command line."""
    return configured(parse(TEXT, settings), json.dumps(config))[0]


def named(config: Config, *settings: str) -> tuple[str, ...]:
    """Return what of `config` is named as not modelled."""
    return configured(parse(TEXT, settings), json.dumps(config))[1]


def assumed(config: Config, *settings: str) -> tuple[str, ...]:
    """Return the values that neither `config` nor the `settings` give."""
    return configured(parse(TEXT, settings), json.dumps(config)).assumed
