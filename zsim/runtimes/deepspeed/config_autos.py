"""DeepSpeed options that Hugging Face fills in ("auto"), or that have another name.

Values are filled as in `trainer_config_process` and `trainer_config_finalize` of
`HfTrainerDeepSpeedConfig` (transformers 5.23, `integrations/deepspeed.py`) and `_prepare_deepspeed`
(Accelerate 1.15, `accelerator.py`). DeepSpeed itself uses its default if a value is "auto".
"""

from collections.abc import Mapping
from typing import Any

from zsim.runtimes.trainer_files.tables import Said, TrainerFileError

AUTO = "auto"
ZERO = "zero_optimization"

BY_HIDDEN_SIZE: Mapping[str, tuple[int, int, int]] = {
    "reduce_bucket_size": (1, 1, 2),
    "stage3_prefetch_bucket_size": (9, 10, 2),
    "stage3_param_persistence_threshold": (10, 1, 1),
}
"""Options of `zero_optimization` that are `numerator / denominator * hidden_size ** power`."""

CLIPPING, CLIP_NORM = "gradient_clipping", 1.0
"""`max_grad_norm` of `TrainingArguments`; its default is 1.0, as in Accelerate."""

WITHOUT_PREFIX = (
    *("prefetch_bucket_size", "param_persistence_threshold", "model_persistence_threshold"),
    *("max_live_parameters", "max_reuse_distance", "gather_16bit_weights_on_model_save"),
    *("module_granularity_threshold", "use_all_reduce_for_fetch_params", "allgather_sequential"),
)
"""Fields of `DeepSpeedZeroConfig` that it also reads without their prefix `stage3_`."""


def is_filled(name: str) -> bool:
    """Return True if Hugging Face fills the option `name` from the model, or by its default."""
    return name == CLIPPING or name.removeprefix(f"{ZERO}.") in BY_HIDDEN_SIZE


def full_names(options: dict[str, object]) -> None:
    """Give options of stage 3 their prefix; a name that has the prefix takes precedence."""
    for name in WITHOUT_PREFIX:
        if f"{ZERO}.{name}" in options:
            options.setdefault(f"{ZERO}.stage3_{name}", options.pop(f"{ZERO}.{name}"))


def take_autos(options: dict[str, object]) -> list[str]:
    """Remove the options that are "auto" from `options`; return the filled ones."""
    found = [name for name, value in options.items() if value == AUTO]
    for name in found:
        del options[name]
    return [name for name in found if is_filled(name)]


def fill_autos(
    field: str,
    names: list[str],
    said: dict[str, Said],
    tables: Mapping[str, Mapping[str, Any]],
    *,
    hidden_size: int | None,
) -> None:
    """Set the values with which `names` are filled, unless a table of the scenario sets them.

    Raises:
        TrainerFileError: the model has no hidden size to compute them from.
    """
    runtime = tables["zero"].get("deepspeed") or {}
    for name in names:
        if name == CLIPPING:
            if "clip_norm" not in tables["train"]:
                said["train.clip_norm"] = Said(name, CLIP_NORM)
            continue
        option = name.removeprefix(f"{ZERO}.")
        if option in runtime:
            continue
        if hidden_size is None:
            why = "is made from model.hidden_size, which is missing; give a number"
            raise TrainerFileError(f'{field}: {name}: "{AUTO}" {why}')
        numerator, denominator, power = BY_HIDDEN_SIZE[option]
        elements = numerator * hidden_size**power // denominator
        said[f"zero.deepspeed.{option}"] = Said(name, elements)
