"""The shape of a model from the `config.json` of Hugging Face's transformers.

Only keys that affect parameters, FLOPs and bytes are read. Ignored are dropout, the epsilons of
norms, initialization, scales of embeddings and scores, caps of logits and scores, and the base,
scaling and share of rotary positions.
"""

from typing import cast

from pydantic import ValidationError

from zsim.bounded_text import bounded_json
from zsim.config_error import line, shown
from zsim.scenario.hugging_face_architectures import READERS, REFUSED
from zsim.scenario.hugging_face_values import Config, Fields
from zsim.scenario.tables import ModelTable, Scenario, ScenarioError


def configured(scenario: Scenario, text: str) -> Scenario:
    """Return `scenario` with the shape in `text`, a config.json; keys of `[model]` take precedence.

    Raises:
        ScenarioError: it is not a configuration, or of an architecture that zsim does not support.
    """
    table = scenario.model
    given = {name: getattr(table, name) for name in table.model_fields_set - {"hf_config"}}
    fields = {"architecture": "gpt", **shape_fields(text), **given}
    try:
        read = ModelTable.model_validate(fields)
    except ValidationError as error:
        why = line(error.errors(include_url=False), ModelTable)
        raise ScenarioError(f"model.hf_config: {why}") from None
    return scenario.model_copy(update={"model": read})


def shape_fields(text: str) -> Fields:
    """Return the fields of `[model]` that a config.json gives.

    Raises:
        ScenarioError: it is not a configuration, or of an architecture that zsim does not support.
    """
    try:
        found = bounded_json(text)
    except ValueError as error:
        raise ScenarioError(f"model.hf_config: not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ScenarioError("model.hf_config: must be an object, as config.json is")
    config = cast("Config", found)
    kind = config.get("model_type")
    for why, kinds in REFUSED.items():
        if kind in kinds:
            raise ScenarioError(f"model.hf_config: model_type {shown(kind)} is {why}")
    if not isinstance(kind, str) or kind not in READERS:
        known = ", ".join(READERS)
        said = "missing;" if kind is None else shown(kind)
        raise ScenarioError(f"model.hf_config: model_type {said} must be one of {known}")
    return READERS[kind](config)
