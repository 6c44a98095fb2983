"""DeepSpeed options that Hugging Face fills in ("auto"), or that have another name.

Values are filled as in `trainer_config_process` and `trainer_config_finalize` of
`HfTrainerDeepSpeedConfig` (transformers 5.23, `integrations/deepspeed.py`) and `_prepare_deepspeed`
(Accelerate 1.15, `accelerator.py`). The scenario has the place of `TrainingArguments`: values that
it does not give have the defaults of that class. DeepSpeed itself uses its default for any other
option that is "auto".
"""

from collections.abc import Mapping
from typing import Any

from zsim.runtimes.trainer_files.tables import FileOption, TrainerFileError

AUTO = "auto"
ZERO = "zero_optimization"

BY_HIDDEN_SIZE: Mapping[str, tuple[int, int, int]] = {
    "reduce_bucket_size": (1, 1, 2),
    "stage3_prefetch_bucket_size": (9, 10, 2),
    "stage3_param_persistence_threshold": (10, 1, 1),
}
"""Options of `zero_optimization` that are `numerator / denominator * hidden_size ** power`."""

CLIP_NORM = 1.0
"""`max_grad_norm` of `TrainingArguments` by default, as in Accelerate."""

MICRO, ACCUMULATION = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
PARAMS = "optimizer.params"
ARGUMENTS: Mapping[str, tuple[str, object]] = {
    MICRO: ("micro_batch_size", 8),
    ACCUMULATION: ("gradient_accumulation_steps", 1),
    "gradient_clipping": ("clip_norm", CLIP_NORM),
    f"{PARAMS}.lr": ("learning_rate", 5e-5),
    f"{PARAMS}.eps": ("epsilon", 1e-8),
    f"{PARAMS}.weight_decay": ("weight_decay", 0.0),
}
"""Options that `TrainingArguments` gives: the key of `[train]`, and the default."""

BETAS = (0.9, 0.999)
"""`adam_beta1` and `adam_beta2` of `TrainingArguments` by default."""

SIZES = frozenset({"micro_batch_size", "gradient_accumulation_steps", "global_batch_size"})
"""Keys of `[train]`; any two of them determine the third."""

WITHOUT_PREFIX = (
    *("prefetch_bucket_size", "param_persistence_threshold", "model_persistence_threshold"),
    *("max_live_parameters", "max_reuse_distance", "gather_16bit_weights_on_model_save"),
    *("module_granularity_threshold", "use_all_reduce_for_fetch_params", "allgather_sequential"),
)
"""Fields of `DeepSpeedZeroConfig` that it also reads without their prefix `stage3_`."""


def is_filled(name: str) -> bool:
    """Return True if Hugging Face fills the option `name` from the model's hidden size."""
    return name.removeprefix(f"{ZERO}.") in BY_HIDDEN_SIZE


def full_names(options: dict[str, object]) -> None:
    """Give options of stage 3 their prefix; a name that has the prefix takes precedence."""
    for name in WITHOUT_PREFIX:
        if f"{ZERO}.{name}" in options:
            options.setdefault(f"{ZERO}.stage3_{name}", options.pop(f"{ZERO}.{name}"))


def take_autos(options: dict[str, object]) -> list[str]:
    """Remove the options that are "auto" from `options`; return their names."""
    found = [name for name, value in options.items() if value == AUTO]
    for name in found:
        del options[name]
    return found


def fill_arguments(
    options: dict[str, object], autos: list[str], train: Mapping[str, Any]
) -> list[str]:
    """Put defaults of `TrainingArguments` in `options` where `autos` has no value in `train`.

    Return the batch sizes that were filled so, each with its value and its key in a scenario.
    """
    given: set[str] = {*SIZES} & train.keys()
    given |= {"global_batch_size"} if "train_batch_size" in options else set()
    given |= {ARGUMENTS[name][0] for name in (MICRO, ACCUMULATION) if name in options}
    if "train_batch_size" in autos and MICRO not in options:
        autos = [*autos, MICRO]  # it is computed from the micro-batch of every rank
    assumed: list[str] = []
    for name, (key, default) in ARGUMENTS.items():
        if name not in autos or key in train:
            continue
        if key in SIZES:
            if len(given) > 1:
                continue  # the two others give it
            given.add(key)
            assumed.append(f"{name} is {default} (train.{key} gives another)")
        if key != "learning_rate" or "learning_rates" not in train:
            options[name] = default
    if f"{PARAMS}.betas" in autos and not {"beta1", "beta2"} & train.keys():
        options[f"{PARAMS}.betas"] = [*BETAS]
    return assumed


def fill_autos(
    field: str,
    names: list[str],
    said: dict[str, FileOption],
    tables: Mapping[str, Mapping[str, Any]],
    *,
    hidden_size: int | None,
) -> None:
    """Set the values with which `names` are filled, unless a table of the scenario sets them.

    Raises:
        TrainerFileError: the model has no hidden size to compute them from.
    """
    runtime = tables["zero"].get("deepspeed") or {}
    for name in filter(is_filled, names):
        option = name.removeprefix(f"{ZERO}.")
        if option in runtime:
            continue
        if hidden_size is None:
            why = "is made from model.hidden_size, which is missing; give a number"
            raise TrainerFileError(f'{field}: {name}: "{AUTO}" {why}')
        numerator, denominator, power = BY_HIDDEN_SIZE[option]
        elements = numerator * hidden_size**power // denominator
        said[f"zero.deepspeed.{option}"] = FileOption(name, elements)
