"""Arguments of Megatron-LM that set number formats of GEMMs, of weights and of the optimizer."""

from zsim.runtimes.trainer_files.named_arguments import Arguments
from zsim.strategy.execution import Float8

WITHOUT_EFFECT = (
    *("fp8-margin", "fp8-interval", "fp8-amax-history-len", "fp8-amax-compute-algo"),
    "tp-only-amax-red",
)
"""Arguments that change scales only; the reduction of amaxes is of a few numbers a step."""

WIDE_LAYERS = ("num-layers-at-start-in-bf16", "num-layers-at-end-in-bf16")


def read_formats(arguments: Arguments) -> None:
    """Set the scaling of GEMMs, and the layers that stay in bf16.

    Raises:
        TrainerFileError: an argument requests something that is not modelled.
    """
    arguments.drop(WITHOUT_EFFECT)
    name = "fp8-format"
    for old in ("fp8-e4m3", "fp8-hybrid"):  # before 2023-09
        if arguments.flag(old):
            arguments.given.setdefault(name, [old.removeprefix("fp8-")])
    in_8_bits = arguments.word(name, "", ("e4m3", "hybrid"))
    recipe = arguments.word("fp8-recipe", Float8.DELAYED, (*RECIPES, "custom"))
    in_4_bits = arguments.word("fp4-format", "", ("e2m1",))
    fourfold = arguments.word("fp4-recipe", "nvfp4", ("nvfp4", "custom"))
    if in_8_bits and in_4_bits:
        raise arguments.wrong("fp4-format", f"contradicts {arguments.called(name)}")
    if in_8_bits:
        if recipe not in RECIPES:
            raise arguments.wrong("fp8-recipe", f"{recipe} is not modelled")
        arguments.set_field("train.float8", recipe, "fp8-recipe")
    elif in_4_bits:
        if fourfold != "nvfp4":
            raise arguments.wrong("fp4-recipe", f"{fourfold} is not modelled")
        arguments.set_field("train.float4", fourfold, "fp4-format")
    _wide_layers(arguments, is_narrow=bool(in_8_bits or in_4_bits))


RECIPES = (Float8.DELAYED, Float8.TENSORWISE, Float8.BLOCKWISE, Float8.MXFP8)


def _wide_layers(arguments: Arguments, *, is_narrow: bool) -> None:
    """Set the first and last layers in bf16 (`is_first_last_bf16_layer`)."""
    has_some = arguments.flag("first-last-layers-bf16")
    for name in WIDE_LAYERS:
        count = arguments.number(name, 1.0)
        if count < 0 or not count.is_integer():
            raise arguments.wrong(name, f"{count} must be a whole number of at least 0")
        if has_some and is_narrow:
            arguments.set_field(f"train.{name.replace('-', '_')}", int(count), name)


def state_options(arguments: Arguments) -> dict[str, tuple[str, object]]:
    """Return options of weights in 8 bits and of the precision-aware optimizer, with their names.

    Raises:
        TrainerFileError: a format is none of `validate_args`.
    """
    gathers, aware = "fp8-param-gather", "use-precision-aware-optimizer"
    gathered = arguments.flag(gathers)
    if arguments.flag("reuse-grad-buf-for-mxfp8-param-ag") and not gathered:
        raise arguments.wrong("reuse-grad-buf-for-mxfp8-param-ag", f"needs --{gathers}")
    found: dict[str, tuple[str, object]] = {
        "fp8_param_gather": (gathers, gathered),
        "use_precision_aware_optimizer": (aware, arguments.flag(aware)),
    }
    if (masters := arguments.word("main-params-dtype", "fp32", ("fp32", "fp16"))) != "fp32":
        raise arguments.wrong("main-params-dtype", f"{masters} is not modelled")
    for name, allowed in STATES.items():
        option = f"{name}-dtype"
        found[option.replace("-", "_")] = (option, arguments.word(option, "fp32", allowed))
    return found


STATES = {
    "main-grads": ("fp32", "bf16"),
    "exp-avg": ("fp32", "fp16", "bf16", "fp8"),
    "exp-avg-sq": ("fp32", "fp16", "bf16", "fp8"),
}
"""Tensors of the precision-aware optimizer, and their formats."""
