"""Parameters of a small decoder, counted by zsim and by the modules of transformers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from published_configs import Config
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

import zsim

SIZES: Config = {
    "vocab_size": 208,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}

TOKENS: dict[str, Config] = {kind: {"pad_token_id": 0} for kind in ("glm", "glm4", "smollm3")}
"""Keys without parameters that a small model of transformers needs."""


def counted(config: Config, folder: Path, **settings: object) -> int:
    path = folder / "config.json"
    path.write_text(json.dumps(config), "utf-8")
    changes = {"model.hf_config": str(path), "model.sequence_length": 16, **settings}
    return zsim.load("tiny", changes).model.parameter_count


def counted_by_transformers(config: Config) -> int:
    kind = str(config["model_type"])
    keys = {key: config[key] for key in config if key != "model_type"}
    made = CONFIG_MAPPING[kind](**cast("dict[str, Any]", keys | TOKENS.get(kind, {})))
    with torch.device("meta"):
        from_config = cast("Callable[[object], nn.Module]", AutoModelForCausalLM.from_config)
        module = from_config(made)
    return sum(each.numel() for each in {id(each): each for each in module.parameters()}.values())
