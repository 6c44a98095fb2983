"""Refusals name values as files do: `true`, `false` and `null`, not as Python does."""

import json
import re
from dataclasses import replace
from typing import get_args

import pytest
from pydantic import BaseModel
from refusals import job_of, model_or_line, tables_with
from valid_files import CONFIGURATIONS

from zsim.api.scenario import load
from zsim.mistake import MistakeError
from zsim.model.model import Model
from zsim.scenario.hugging_face import shape_fields
from zsim.scenario.tables import Scenario, ScenarioError
from zsim_torch.admission import refusal
from zsim_torch.supervise.process_group import DeviceChoice

PYTHONS_OWN = re.compile(r"\b(True|False|None)\b")


def flags(root: type[BaseModel], above: str = "") -> list[str]:
    """Return the keys of a scenario."""
    found: list[str] = []
    for name, each in root.model_fields.items():
        found.append(f"{above}{name}")
        for kind in kinds(each.annotation):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                found += flags(kind, f"{above}{name}.")
    return found


def kinds(hint: object) -> list[object]:
    return [hint, *(kind for each in get_args(hint) for kind in kinds(each))]


@pytest.mark.parametrize("value", [True, False])
def test_no_refusal_of_a_scenario_has_pythons_words_for_true_and_false(value: bool) -> None:
    told: list[str] = []
    for key in flags(Scenario):
        try:
            load("tiny", {key: value})
        except MistakeError as refused:
            told.append(str(refused))
    assert len(told) > 50
    assert not [line for line in told if PYTHONS_OWN.search(line)]


@pytest.mark.parametrize("value", [True, False, None])
def test_no_refusal_of_a_models_config_has_pythons_words(value: object) -> None:
    told: list[str] = []
    for config in CONFIGURATIONS:
        for key in config:
            try:
                shape_fields(json.dumps({**config, key: value}))
            except ScenarioError as refused:
                told.append(str(refused))
    assert told
    assert not [line for line in told if PYTHONS_OWN.search(line)]


def test_a_job_names_features_that_no_torch_module_has_as_a_file_does() -> None:
    plain = job_of()
    assert plain is not None
    for setting, line in {
        ("model.norm_bias", True): "model.norm_bias: true is simulated only",
        ("model.norm_weight", False): "model.norm_weight: false is simulated only",
        ("model.activation", "relu"): "model.activation: relu is simulated only",
    }.items():
        model = model_or_line(tables_with(None, setting))
        assert isinstance(model, Model)
        assert refusal(replace(plain, model=model), device=DeviceChoice.CPU, torchrun=None) == line
