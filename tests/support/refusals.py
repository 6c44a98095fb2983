"""Combinations of settings that zsim refuses, found by trying them.

Each runtime is tried with every flag and choice of a scenario and of its options: alone, then
with each parallel axis and with full checkpointing. Flags and choices are read from the tables, so
that a new one is tried without a change here; `NUMBERS` has keys whose values are numbers. Lines
that name a missing prerequisite ("needs ...") are not refusals of a combination.
"""

import re
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from enum import Enum
from functools import cache
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from zsim.backend.backend import Job
from zsim.cluster.cluster import Cluster
from zsim.cluster.profile.network import NetworkProfile
from zsim.files.installed import topology
from zsim.model.model import Model, ModelError
from zsim.runtimes.lookup import runtimes
from zsim.runtimes.registry import need_trainable
from zsim.scenario.resolve import resolve
from zsim.scenario.resolved_scenario import ResolvedScenario
from zsim.scenario.tables import ModelTable, ScenarioError, from_tables
from zsim.strategy.activations import Activations
from zsim.strategy.offload import Offload
from zsim.strategy.parallel_axes import ParallelAxes
from zsim.strategy.strategy import STAGES
from zsim.strategy.train import TrainKnobs
from zsim.strategy.zero_knobs import ZeroKnobs

Setting = tuple[str, object]
"""A key of a scenario, such as `zero.stage`, and its value."""

TABLES: dict[str, Any] = {
    "title": "tried",
    "model": {
        "architecture": "llama",
        "layers": 4,
        "hidden_size": 64,
        "attention_heads": 4,
        "sequence_length": 64,
        "vocab_size": 256,
    },
    "cluster": {"node": "dgx_h100", "fabric": "single_switch", "gpu": "b200_sxm_180gb"},
    "parallel": {"data": 4},
    "zero": {},
    "activations": {},
    "offload": {},
    "train": {"micro_batch_size": 2, "gradient_accumulation_steps": 4, "precision": "bf16"},
}
"""A scenario that every runtime accepts, but for its stage."""

AXES = tuple(
    (f"parallel.{name}", 2)
    for name, field in ParallelAxes.model_fields.items()
    if field.default == 1
)
PIPELINE: Setting = ("parallel.pipeline", 2)
FULL: Setting = ("activations.checkpointing", "full")
WITH: tuple[Setting, ...] = (*AXES, FULL)
"""Settings with which each other setting is tried."""

OPTIONS_WITH: tuple[Setting, ...] = (
    *WITH,
    ("train.compile", True),
    ("train.float8", "tensorwise"),
    ("train.precision", "pure_bf16"),
)
"""Settings with which each option of a runtime is tried."""

NUMBERS: tuple[Setting, ...] = (
    ("model.dropout", 0.1),
    ("model.window", 16),
    ("model.hidden_groups", 2),
    ("model.lora", {"rank": 2}),
    ("model.frozen", ["embedding.*"]),
    ("model.experts", {"count": 4, "top_k": 2, "intermediate_size": 32}),
    ("model.latent", {"key_value_rank": 16}),
    ("model.mtp_layers", 1),
    ("activations.every_nth", 2),
    ("train.metrics", 1),
    ("train.optimizer", "sgd"),
    ("train.group", [{"parameters": ["embedding.*"], "weight_decay": 0.0}]),
)
OWN_NUMBERS: tuple[Setting, ...] = (
    ("zero.tiles", 2),
    ("zero.secondary", 2),
    ("offload.device_share", 0.5),
)
NEEDED: dict[str, tuple[Setting, ...]] = {
    "model.shared_norm": (("model.parallel_residual", True),),
    "activations.partition": (FULL, ("parallel.tensor", 2)),
    "activations.every_nth": (FULL,),
    "offload.checkpoints": (FULL,),
    "offload.parameters": (("offload.optimizer", "host"),),
    "offload.gradients": (("offload.optimizer", "nvme"),),
    "offload.device_share": (("offload.optimizer", "host"),),
    "offload.delayed_update": (("offload.optimizer", "host"),),
    "parallel.context_exchange": (("parallel.context", 2),),
    "zero.fused_buffers": (("zero.stage", 2),),
    "zero.deepspeed.cpu_checkpointing": (FULL,),
    "zero.deepspeed.checkpoint_stream": (FULL, ("zero.deepspeed.cpu_checkpointing", True)),
    "zero.fsdp1.offload_wrapper": (FULL,),
    "zero.fsdp2.offload_wrapper": (FULL,),
    "zero.fsdp2.pipeline_schedule": (
        ("parallel.pipeline", 2),
        ("zero.fsdp2.reshard_after_forward", False),
    ),
    "zero.fsdp2.enable_fsdp_float8_all_gather": (("train.float8", "tensorwise"),),
    "zero.fsdp2.enable_async_tensor_parallel": (("train.compile", True), ("parallel.tensor", 2)),
    **{
        f"zero.megatron.{name}": (
            ("zero.megatron.use_precision_aware_optimizer", True),
            ("zero.megatron.grad_reduce_in_fp32", False),
        )
        for name in ("main_grads_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
    },
    "zero.megatron.fp8_param_gather": (("train.float8", "tensorwise"),),
    "zero.megatron.overlap_param_gather": (("zero.megatron.overlap_grad_reduce", True),),
    "zero.megatron.tp_comm_overlap": (
        ("zero.megatron.sequence_parallel", True),
        ("parallel.tensor", 2),
    ),
    "zero.megatron.tp_comm_overlap_rs": (
        ("zero.megatron.sequence_parallel", True),
        ("zero.megatron.tp_comm_overlap", True),
        ("parallel.tensor", 2),
    ),
    "zero.megatron.account_for_embedding_in_pipeline_split": (
        ("parallel.pipeline", 2),
        ("model.layers", 3),
    ),
    "zero.megatron.account_for_loss_in_pipeline_split": (
        ("parallel.pipeline", 2),
        ("model.layers", 3),
    ),
}
"""Settings without which a key has no effect or is a mistake: they are set too."""

INTEGERS = ("int8", "int64")
NOT_CHOICES = {"reduce_dtype": INTEGERS, "communication_data_type": INTEGERS}
"""Values of the type of a key that the key never has."""

PREREQUISITE = re.compile(r"\bneeds?\b|\bnot for adam\b")
"""Lines that name a missing prerequisite of a setting."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A setting that is refused, alone or with another one, and the line of the refusal."""

    setting: Setting
    other: Setting | None
    line: str


def choices(table: type[BaseModel], prefix: str) -> Iterator[Setting]:
    """Yield each flag and choice of `table` at each value but its default."""
    for name, field in table.model_fields.items():
        for value in _values(field.annotation):
            if value != field.default and value not in NOT_CHOICES.get(name, ()):
                yield f"{prefix}.{name}", value


def _values(annotation: object) -> Iterator[object]:
    if annotation is bool:
        yield from (True, False)
    elif isinstance(annotation, type) and issubclass(annotation, Enum):
        yield from (each.value for each in annotation)
    elif get_origin(annotation) is Literal:
        yield from get_args(annotation)
    elif get_origin(annotation) in (Union, UnionType):
        for each in get_args(annotation):
            yield from _values(each)
    elif hasattr(annotation, "__metadata__"):
        yield from _values(get_args(annotation)[0])


def settings_of(runtime: str | None) -> tuple[Setting, ...]:
    """Return the settings to try with a runtime; None for zsim's own stages."""
    found: list[Setting] = [("zero.stage", stage) for stage in STAGES]
    found += [*AXES, *NUMBERS, *choices(ParallelAxes, "parallel")]
    found += [*choices(Activations, "activations"), *choices(TrainKnobs, "train")]
    if runtime is None:
        found += [*choices(ModelTable, "model"), *OWN_NUMBERS]
        found += [*choices(ZeroKnobs, "zero"), *choices(Offload, "offload")]
    else:
        found += choices(runtimes()[runtime].options, f"zero.{runtime}")
    return tuple(found)


def refusals_of(runtime: str | None) -> Iterator[Refusal]:
    """Yield each setting that `runtime` refuses, alone or with another one."""
    for setting in settings_of(runtime):
        alone = _line(runtime, setting)
        if alone is not None:
            yield Refusal(setting, None, alone)
            continue
        for other in _others(runtime, setting):
            line = _line(runtime, other, setting)
            if line is not None and _line(runtime, other) is None:
                yield Refusal(setting, other, line)


def _others(runtime: str | None, setting: Setting) -> Iterator[Setting]:
    """Yield the settings with which `setting` is tried.

    zsim's own stages try each model with each axis but the pipeline, so other runtimes need that.
    """
    table, key = setting[0].partition(".")[0], setting[0]
    found = OPTIONS_WITH if table == "zero" else WITH
    if table == "model":
        found = AXES if runtime is None else (PIPELINE,)
    yield from (each for each in found if each[0] != key)


def _line(runtime: str | None, *settings: Setting) -> str | None:
    """Return the line of a refusal, or None; a missing prerequisite is none."""
    found = model_or_line(tables_with(runtime, *settings))
    return found if isinstance(found, str) and not PREREQUISITE.search(found) else None


def tables_with(runtime: str | None, *settings: Setting) -> dict[str, Any]:
    """Return the tables of a scenario with a runtime and some settings, the last ones first."""
    tables = deepcopy(TABLES)
    zero = tables["zero"]
    zero["stage"] = 3
    if runtime is not None:
        zero["emulate"] = runtime
        zero["stage"] = max(runtimes()[runtime].options.stages)
    for key, value in (each for one in settings for each in (*NEEDED.get(one[0], ()), one)):
        place = tables
        *path, name = key.split(".")
        for part in path:
            place = place.setdefault(part, {})
        place[name] = value
    return tables


def model_or_line(tables: Mapping[str, Any]) -> Model | str:
    """Return the model of a scenario, or the line with which zsim refuses the scenario."""
    try:
        found = resolve(from_tables(tables), _topology, _no_profile)
        model = _model(found)
        need_trainable(model, found.strategy)
    except (ScenarioError, ModelError) as error:
        return str(error.args[0])
    return model


def job_of(*settings: Setting, runtime: str | None = None) -> Job | None:
    """Return the job of a scenario with a runtime and some settings; None if it is refused."""
    tables = tables_with(runtime, *settings)
    if isinstance(model_or_line(tables), str):
        return None
    try:
        return resolve(from_tables(tables), _topology, _no_profile).make_job()
    except ModelError:
        return None


_MODELS: dict[object, Model | ScenarioError] = {}


def _model(found: ResolvedScenario) -> Model:
    """Return the model of `found`, from a cache by all settings that a model depends on.

    Raises:
        ScenarioError: the model cannot be made.
    """
    of = found.strategy
    key = (
        found.shape.model_dump_json(),
        *(found.micro_batch_size, of.parallel.tensor, of.parallel.pipeline > 1),
        *(of.train.precision, of.cuts_tokens, of.keeps_gathered, of.in_place_loss, of.execution),
        of.activations.checkpointing,
    )
    if key not in _MODELS:
        try:
            _MODELS[key] = found.make_model()
        except ScenarioError as error:
            _MODELS[key] = error
    made = _MODELS[key]
    if isinstance(made, ScenarioError):
        raise made
    return made


@cache
def _topology(
    name: str,
    fabric: str | None,
    nodes: int,
    gpu: str | None,
    /,
    *,
    nodes_per_domain: int | None,
) -> Cluster:
    return topology(name, fabric, nodes, gpu, nodes_per_domain=nodes_per_domain)


def _no_profile(name: str) -> NetworkProfile:
    raise AssertionError(name)
