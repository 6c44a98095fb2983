"""Scenario files: what is read, and what one line says about what is not."""

from collections.abc import Iterator
from inspect import get_annotations
from pathlib import Path
from typing import get_args

import pytest
from pydantic import BaseModel

from zsim.runtimes.lookup import runtimes
from zsim.scenario.tables import (
    ParallelTable,
    Scenario,
    ScenarioError,
    TrainTable,
    ZeroTable,
)
from zsim.scenario.toml import parse
from zsim.strategy.activations import Checkpointing
from zsim.strategy.config_table import Table
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import Train

TEXT = """
title = "two layers"
[model]
layers = 2
hidden_size = 8
attention_heads = 2
sequence_length = 4
vocab_size = 16
[cluster]
topology = "dgx2_infiniband"
nodes = 1
[zero]
stage = 2
[activations]
checkpointing = "full"
[train]
micro_batch_size = 1
gradient_accumulation_steps = 1
"""


def test_a_scenario_says_what_its_file_says() -> None:
    scenario = parse(TEXT)
    assert scenario.model.hidden_size == 8
    assert scenario.activations.checkpointing is Checkpointing.FULL
    assert scenario.train.steps == 2  # a key left out has its default


def test_a_whole_valued_float_is_a_whole_number() -> None:
    assert parse(TEXT, ["model.hidden_size=1e3"]).model.hidden_size == 1000


def test_a_size_is_given_with_its_unit() -> None:
    # GiB is 2**30 bytes, GB is 10**9.
    assert parse(TEXT, ["cluster.gpu_memory=32 GiB"]).cluster.gpu_memory == 32 * 2**30
    assert parse(TEXT, ['cluster.gpu_memory="32 GB"']).cluster.gpu_memory == 32 * 10**9


def test_a_setting_replaces_the_file_and_a_later_one_replaces_an_earlier() -> None:
    assert parse(TEXT, ["zero.stage=3", "zero.stage=1"]).zero.stage == 1


def test_a_bare_word_in_a_setting_is_a_string() -> None:
    plain = parse(TEXT, ["train.precision=bf16"])
    assert plain == parse(TEXT, ['train.precision="bf16"'])


def test_a_setting_makes_the_table_that_the_file_lacks() -> None:
    assert parse(TEXT, ["train.loss_scale.interval=5"]).train.loss_scale.interval == 5


WRONG = {
    "zero.stge=3": "zero.stge: unknown key; did you mean stage? allowed: bucket_elements, ",
    "modle.layers=3": "modle: unknown key; did you mean model? allowed: title, model, cluster",
    "train.loss_scale.grow=2": "train.loss_scale.grow: unknown key; did you mean growth?",
    "zero.stage=4": "zero.stage: 4 must be 0, 1, 2 or 3",
    "zero.stage=true": "zero.stage: true must be 0, 1, 2 or 3",
    "zero=3": "zero: 3 must be a table",
    "zero.reduce_once=1": "zero.reduce_once: 1 must be true or false",
    "zero.bucket_elements=0": "zero.bucket_elements: 0 must be at least 1",
    "zero.keep_after_forward=some": "zero.keep_after_forward: 'some' must be 'nothing' or",
    "cluster.nodes=0": "cluster.nodes: 0 must be at least 1",
    "cluster.nodes=-25": "cluster.nodes: -25 must be at least 1",
    "cluster.nodes=1.5": "cluster.nodes: 1.5 must be a whole number",
    "cluster.nodes=true": "cluster.nodes: true must be a whole number",
    "cluster.nodes=inf": "cluster.nodes: inf must be a whole number",
    "cluster.topology=7": "cluster.topology: 7 must be a string",
    "cluster.gpu_memory=32 Gb": (
        'cluster.gpu_memory: \'32 Gb\' must be a size such as "32 GB" or "80 GiB"; '
        "bits are not accepted"
    ),
    "cluster.gpu_memory=32 GB/s": "cluster.gpu_memory: '32 GB/s' must be a size such as",
    "cluster.gpu_memory=32": "cluster.gpu_memory: 32 must be a size with its unit",
    "cluster.node=7": "cluster.node: 7 must be a string",
    "cluster.oversubscription=0": "cluster.oversubscription: 0 must be a ratio of more than 0",
    "cluster.oversubscription=2:1": "cluster.oversubscription: '2:1' must be a ratio of more than",
    "model.hf_config=7": "model.hf_config: 7 must be a string",
    "model.architecture=bert": "model.architecture: 'bert' must be 'gpt' or 'llama'",
    "model.attention=fast": "model.attention: 'fast' must be 'plain', 'flash', 'flash2' or 'cudnn'",
    "model.layers=1e9": "model.layers: 1000000000 must be at most 100000",
    "train.precision=fp8": (
        "train.precision: 'fp8' is no dtype of parameters; keep bf16 and set float8 ="
    ),
    "train.precision=fp12": (
        "train.precision: 'fp12' must be 'fp16', 'bf16', 'pure_bf16', 'fp32' or 'fp64'"
    ),
    "train.optimizer=lamb": "train.optimizer: 'lamb' must be 'adam', 'sgd', 'adamw_8bit' or",
    "train.clip_norm=nan": "train.clip_norm: nan must be",
    "train.beta1=1.0": "train.beta1: 1 must be less than 1",
    "train.learning_rate=fast": "train.learning_rate: 'fast' must be a number",
    "zero.stage": "--set: 'zero.stage' must be KEY=VALUE, such as zero.stage=3",
    "=3": "--set: '=3' must be KEY=VALUE",
    "zero..stage=3": "--set: 'zero..stage=3' must be KEY=VALUE",
    "zero.stage=[3": "--set: 'zero.stage=[3': the value is not TOML",
    "zero.stage=": "--set: 'zero.stage=': the value is not TOML",
    "zero.stage.x=3": "--set: 'zero.stage.x': stage is a value, not a table",
    "zero.stage=3\n[train]": "--set: 'zero.stage=3\\n[train]' must be one KEY=VALUE",
}


@pytest.mark.parametrize("setting", WRONG)
def test_one_line_says_field_value_and_what_is_allowed(setting: str) -> None:
    with pytest.raises(ScenarioError) as caught:
        parse(TEXT, [setting])
    message = str(caught.value)
    assert message.startswith(WRONG[setting])
    assert "\n" not in message


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "empty; a scenario has title, model, cluster"),
        ("# nothing\n", "empty; "),
        ("title = ", "not TOML: "),
        ("\0\1\2", "not TOML: "),
        ("a = " + "[" * 100_000, "not TOML: "),
        ("[zero]\nstage = 2", "title: missing"),
        (TEXT.replace("stage = 2", '"a\\nb" = 2'), "zero.'a\\nb': unknown key; "),
    ],
)
def test_text_that_is_no_scenario_is_refused_in_one_line(text: str, why: str) -> None:
    with pytest.raises(ScenarioError) as caught:
        parse(text)
    assert str(caught.value).startswith(why)
    assert "\n" not in str(caught.value)


def test_a_misspelt_key_is_named_before_the_key_that_it_leaves_missing() -> None:
    with pytest.raises(ScenarioError, match=r"^cluster\.topologie: unknown key; did you mean topo"):
        parse(TEXT.replace("topology", "topologie"))


LEFT_OPEN = {"data", "stage", "emulate", "optimizer", "learning_rates"}
"""Keys that a file may leave open, or says in another form than a strategy."""


@pytest.mark.parametrize(
    ("file", "settled"), [(ParallelTable, Parallel), (ZeroTable, Zero), (TrainTable, Train)]
)
def test_a_knob_is_defined_once_for_files_and_strategies(
    *, file: type[Table], settled: type[Table]
) -> None:
    left_open = {*LEFT_OPEN, "gradient_accumulation_steps"}
    common = (file.model_fields.keys() & settled.model_fields.keys()) - left_open
    assert common
    for name in common:
        (owner,) = {
            next(each for each in kind.__mro__ if name in get_annotations(each))
            for kind in (file, settled)
        }
        assert owner not in {file, settled}


def test_every_knob_of_a_strategy_can_be_set_in_a_file() -> None:
    for name, field in Strategy.model_fields.items():
        settled, file = field.annotation, Scenario.model_fields[name].annotation
        assert isinstance(settled, type)
        assert isinstance(file, type)
        assert issubclass(settled, Table)
        assert issubclass(file, Table)
        missing = settled.model_fields.keys() - file.model_fields.keys()
        assert missing <= {"groups"}  # [[train.group]]


def flat(hint: object) -> Iterator[object]:
    yield hint
    for each in get_args(hint):
        yield from flat(each)


def keys(table: type[BaseModel]) -> Iterator[str]:
    for name, field in table.model_fields.items():
        kinds = [each for each in flat(field.annotation) if isinstance(each, type)]
        inner = [each for each in kinds if issubclass(each, BaseModel)]
        for each in inner:
            yield from keys(each)
        if not inner:
            yield name


def test_the_reference_names_every_key() -> None:
    docs = Path(__file__).parents[3] / "docs"
    reference = docs / "reference"
    pages = (
        docs / "scenario.md",
        reference / "scenario_model.md",
        reference / "trainer_files.md",
    )
    text = "".join(page.read_text("utf-8") for page in pages)
    options = [name for each in runtimes().values() for name in each.options.model_fields]
    assert [key for key in [*keys(Scenario), *options] if f"`{key}`" not in text] == []


def test_adamw_is_the_name_of_adam_with_decoupled_decay() -> None:
    assert TrainTable.model_validate({"optimizer": "adamw"}).optimizer == "adam"
