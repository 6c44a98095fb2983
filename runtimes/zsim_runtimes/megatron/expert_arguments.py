"""Routed experts from arguments of Megatron-LM: their ranks, router and layers.

Defaults follow `validate_args` (`training/arguments.py`) and `TransformerConfig`, 2026-08.
"""

import re
from typing import Final

from zsim.model.experts import DropRule, ExpertKernels, LoadBalancing, RouterFormat, Scores
from zsim.runtimes.trainer_files.named_arguments import Arguments
from zsim.strategy.execution import DispatchLibrary
from zsim_runtimes.megatron.options import DispatcherType

COUNT = "num-experts"
RANKS: Final = {
    "expert-model-parallel-size": "parallel.expert",
    "expert-tensor-parallel-size": "parallel.expert_tensor",
}
"""Arguments of ranks of experts."""

SIZES: Final = {
    "moe-shared-expert-intermediate-size": "shared_intermediate_size",
    "moe-router-num-groups": "groups",
    "moe-router-group-topk": "top_groups",
}
"""Arguments that are whole numbers, and their fields in `[model.experts]`."""

FLAGS: Final = {
    "moe-shared-expert-gate": "shared_gate",
    "moe-router-enable-expert-bias": "score_bias",
}
WITHOUT_EFFECT: Final = (
    "moe-permute-fusion",
    "moe-router-fusion",
    "moe-router-force-load-balancing",
    "moe-per-layer-logging",
)
"""Arguments that change no bytes: kernels are fused in compiled blocks, and tokens balanced."""

OVERLAPS: Final = ("moe-shared-expert-overlap", "overlap-moe-expert-parallel-comm")
"""Flags that overlap exchanges of tokens."""

NO_LOSS: Final = "none"
LAYERS: Final = re.compile(r"\(?\[0\]\*(\d+)\+\[1\]\*(\d+)\)?")
"""`--moe-layer-freq` of first dense layers: a list in Python."""


def set_experts(arguments: Arguments) -> None:
    """Set the experts of the model and their ranks, after the dense shape is set.

    Raises:
        TrainerFileError: the arguments request something that is not modelled.
    """
    for name, field in RANKS.items():
        arguments.set_field(field, arguments.whole(name), name)
    _dispatcher(arguments)
    if COUNT not in arguments.given:  # the scenario may have the model
        return
    _set(arguments, "count", arguments.whole(COUNT), COUNT)
    _set(arguments, "top_k", arguments.whole("moe-router-topk", 2), "moe-router-topk")
    width = "moe-ffn-hidden-size"
    _set(arguments, "intermediate_size", arguments.whole(width, _dense_width(arguments)), width)
    for name, field in SIZES.items():
        _set(arguments, field, arguments.whole(name), name)
    for name, field in FLAGS.items():
        _set(arguments, field, arguments.flag(name) or None, name)
    _capacity(arguments)
    _router(arguments)
    grouped = "moe-grouped-gemm"
    kernels = ExpertKernels.GROUPED if arguments.flag(grouped) else ExpertKernels.LOOP
    _set(arguments, "kernels", kernels, grouped)
    _layers(arguments)
    arguments.drop(WITHOUT_EFFECT)


def _dense_width(arguments: Arguments) -> int | None:
    """Return the width of an MLP, which is the default width of an expert."""
    for field, factor in (("model.intermediate_size", 1), ("model.hidden_size", 4)):
        found = arguments.origins.get(field)
        if found is not None and isinstance(found.value, int):
            return factor * found.value
    return None


def _set(arguments: Arguments, field: str, value: object, name: str) -> None:
    arguments.set_field(f"model.experts.{field}", value, name)


def _router(arguments: Arguments) -> None:
    """Set scores of experts, their format and the loss of the balance."""
    # topk_routing_with_score_function of transformer/moe/moe_utils.py
    name, before = "moe-router-score-function", "moe-router-pre-softmax"
    function = arguments.word(name, "softmax", ("softmax", "sigmoid"))
    is_before = arguments.flag(before)
    scores = Scores.SIGMOID if function == "sigmoid" else Scores.SOFTMAX_OF_CHOSEN
    if function == "softmax" and is_before:
        scores, name = Scores.SOFTMAX, before
        arguments.set_field("model.experts.normalised", value=False, option=before)
    _set(arguments, "scores", scores, name)
    name = "moe-router-topk-scaling-factor"
    _set(arguments, "scaling", arguments.number(name, 1.0), name)
    name = "moe-router-dtype"
    dtype = arguments.word(name, "", ("fp32", "fp64"))
    if dtype == "fp64":
        raise arguments.wrong(name, "fp64 is not modelled, only fp32")
    _set(arguments, "router_format", RouterFormat.FP32 if dtype else None, name)
    coefficient = arguments.number("moe-aux-loss-coeff", 0.0)
    name = "moe-router-load-balancing-type"
    kinds = (*LoadBalancing, NO_LOSS)
    kind = arguments.word(name, LoadBalancing.AUX_LOSS, kinds)
    has_loss = kind != NO_LOSS and coefficient > 0
    _set(arguments, "auxiliary_loss", has_loss, name)
    if has_loss and kind != LoadBalancing.AUX_LOSS:
        _set(arguments, "load_balancing_type", kind, name)
    if has_loss:
        _set(arguments, "auxiliary_coefficient", coefficient, "moe-aux-loss-coeff")
    name = "moe-z-loss-coeff"
    z_coefficient = arguments.number(name, 0.0)
    has_z_loss = z_coefficient > 0
    _set(arguments, "z_loss", has_z_loss or None, name)
    _set(arguments, "z_coefficient", z_coefficient if has_z_loss else None, name)
    name = "moe-router-bias-update-rate"
    rate = arguments.number(name, 1e-3)
    if "model.experts.score_bias" in arguments.origins:
        _set(arguments, "bias_rate", rate, name)


def _capacity(arguments: Arguments) -> None:
    """Set the limit of tokens of an expert; a negative factor is no limit, as upstream."""
    name, pads = "moe-expert-capacity-factor", "moe-pad-expert-input-to-capacity"
    factor = arguments.number(name, -1.0)
    drops = "moe-token-drop-policy"
    policy = DropRule(arguments.word(drops, DropRule.WEIGHT, tuple(DropRule)))
    if factor < 0:
        return
    if factor < 1:
        raise arguments.wrong(name, f"{factor:g} must be at least 1, the mean of an expert")
    _set(arguments, "capacity_factor", factor, name)
    _set(arguments, "pads_to_capacity", arguments.flag(pads) or None, pads)
    if policy is not DropRule.WEIGHT:
        _set(arguments, "drop_policy", policy, drops)


def _layers(arguments: Arguments) -> None:
    """Set the first layers without experts."""
    name = "moe-layer-freq"
    text = arguments.word(name, "1").replace(" ", "")
    if text == "1":
        return
    found = LAYERS.fullmatch(text)
    layers = arguments.origins.get("model.layers")
    if found is None or (layers and int(found[1]) + int(found[2]) != layers.value):
        raise arguments.wrong(name, f"{text!r} must be 1, or as ([0]*3+[1]*58) for all layers")
    _set(arguments, "dense_layers", int(found[1]), name)


def _dispatcher(arguments: Arguments) -> None:
    """Set the dispatcher of tokens, if tokens are exchanged; upstream's default is allgather."""
    name = "moe-token-dispatcher-type"
    kind = arguments.word(name, "allgather", tuple(DispatcherType))
    if arguments.flag("moe-enable-deepep"):  # an older name of flex with DeepEP
        kind = DispatcherType.FLEX
    backend = arguments.word("moe-flex-dispatcher-backend", "deepep", tuple(DispatchLibrary))
    sms = {library: arguments.whole(f"moe-{library}-num-sms") for library in DispatchLibrary}
    table = "zero.megatron"
    for flag in OVERLAPS:
        field = f"{table}.{flag.replace('-', '_')}"
        arguments.set_field(field, arguments.flag(flag) or None, flag)
    ranks = arguments.origins.get("parallel.expert")
    if ranks is None or ranks.value == 1:
        return
    if kind != DispatcherType.ALLTOALL:
        arguments.set_field(f"{table}.moe_token_dispatcher_type", kind, name)
    if kind == DispatcherType.FLEX:
        of = "moe-flex-dispatcher-backend"
        arguments.set_field(f"{table}.moe_flex_dispatcher_backend", backend, of)
        own = DispatchLibrary(backend)
        of = f"moe-{own}-num-sms"
        arguments.set_field(f"{table}.moe_{own}_num_sms", sms[own], of)
