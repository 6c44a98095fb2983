"""The shape of a model from the `config.json` of Hugging Face's transformers.

Only keys that affect parameters, FLOPs and bytes are read. Ignored are dropout, the epsilons of
norms, initialization, scales of embeddings and scores, caps of logits and scores, and the base,
scaling and share of rotary positions.
"""

from typing import Final, cast

from pydantic import ValidationError

from zsim.bounded_text import bounded_json
from zsim.config_error import line, shown
from zsim.runtimes.lookup import kind_of_file
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


LENGTHS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "max_sequence_length",
    "seq_length",
)
"""Keys of the longest sequence of a model."""


USUAL_LENGTH: Final = 8192
"""Maximum sequence length that is assumed if none is given.

Models are mostly pretrained with at most this length, and extended to a longer one at the end:
Llama 3 (arXiv 2407.21783, section 3.4) and Qwen 3 (arXiv 2505.09388, section 3.2) train that way.
"""


def with_usual_length(scenario: Scenario, text: str) -> tuple[Scenario, str]:
    """Return `scenario` with at most the usual sequence length, and where the length comes from.

    `text` is the config.json from which the scenario has the longest sequence of its model.
    """
    longest = scenario.model.sequence_length
    assert longest is not None  # every reader of a config.json gives it
    taken = min(longest, USUAL_LENGTH)
    model = scenario.model.model_copy(update={"sequence_length": taken})
    source = f"{taken:,} is taken, {_length_source(text, longest, taken)}"
    return scenario.model_copy(update={"model": model}), source


def _length_source(text: str, longest: int, taken: int) -> str:
    """Return the source of the length `taken` for `text`, a config.json with the `longest`."""
    config = cast("Config", bounded_json(text))
    inner = config.get("text_config")
    tables = [config, cast("Config", inner)] if isinstance(inner, dict) else [config]
    keys = [name for name in LENGTHS for each in tables if each.get(name) == longest]
    if longest != taken:
        where = f"{keys[0]} of the file" if keys else "its model_type"
        return f"the usual length of pretraining; {where} allows up to {longest:,}"
    where = f"{keys[0]} of the file, its longest" if keys else "the default of its model_type"
    return f"{where}; trainings are often shorter"


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
    if kind is None and (key := kind_of_file(text)) is not None:
        raise ScenarioError(f"model.hf_config: is the file of a trainer; name it as zero.{key}")
    if not isinstance(kind, str) or kind not in READERS:
        known = ", ".join(READERS)
        said = "missing;" if kind is None else shown(kind)
        raise ScenarioError(f"model.hf_config: model_type {said} must be one of {known}")
    return READERS[kind](config)
