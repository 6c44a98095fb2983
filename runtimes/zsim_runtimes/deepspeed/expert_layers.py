"""DeepSpeed's layers of experts with expert ranks: their conditions, and parameter groups.

AutoEP (`AutoEPMoELayer` of module_inject/auto_ep_layer.py) exchanges counts, then all routed
rows, and multiplies in grouped products. The older layer (`deepspeed.moe.layer.MoE`) drops
copies of tokens beyond a capacity and fills up to it, so its all-to-alls have equal blocks and the
host waits for no counts; experts run in sequence. Parameters of experts are separate groups,
sharded and reduced over the ranks with the same experts (`expert_dp_process_group`).

Functions named in comments are from `deepspeed` in August 2026 (edaa7221).
"""

from collections.abc import Sequence
from itertools import groupby

from zsim.model.model import Model, ModelError, Parameter
from zsim.strategy.strategy import Strategy
from zsim.zero.parameter_groups import by_rule
from zsim_runtimes.deepspeed.options import DeepSpeed, ExpertLayer

LEAST_CAPACITY = 4  # MoE.__init__ (moe/layer.py): min_capacity
GROUP_ELEMENTS = 178_956_971
"""Most elements of a group of experts, unless one parameter has more: `max_group_size`."""


def need(model: Model, strategy: Strategy) -> None:
    """Raise ModelError unless the layer of experts can be used as `strategy` says.

    Raises:
        ModelError: the ZeRO stage has no such layer, the layer does not run the model, or states
            are on the host.
    """
    if not strategy.has_expert_order:
        return
    ranks, stage = strategy.parallel.expert, strategy.zero.stage
    native = strategy.options(DeepSpeed).expert_layer is ExpertLayer.NATIVE
    if stage == 3 and native:  # DeepSpeedEngine: "not supported with ZeRO Stage 3"
        why = "with zero.stage 3: native DeepSpeed MoE is not supported; use stage 1 or 2"
        raise ModelError(f"parallel.expert: {ranks} {why}")
    if stage in (0, 3):
        why = f"with zero.stage {stage} is not modelled; use 1 or 2"
        raise ModelError(f"parallel.expert: {ranks} {why}")
    if strategy.options(DeepSpeed).offload_optimizer.is_on:
        why = f"is not modelled with parallel.expert = {ranks}"
        device = strategy.options(DeepSpeed).offload_optimizer.device
        raise ModelError(f"zero.deepspeed.offload_optimizer.device: {device} {why}")
    if native:
        _need_capacity(model, ranks)
    else:
        _need_all_rows(model)


def _need_all_rows(model: Model) -> None:
    """Raise ModelError if a model drops rows, or has biases of experts, which AutoEP does not.

    Raises:
        ModelError: it does.
    """
    experts = None if model.architecture is None else model.architecture.experts
    if experts is None:
        return
    if experts.capacity_factor is not None:
        raise ModelError(
            f"model.experts.capacity_factor: {experts.capacity_factor:g} is not in AutoEP, which "
            "drops no rows; remove it, or set zero.deepspeed.expert_layer = native"
        )
    if experts.bias:
        raise ModelError("model.experts.bias: true is not in AutoEP, whose experts have no biases")


def _need_capacity(model: Model, ranks: int) -> None:
    """Raise ModelError unless copies are filled up to a capacity of at least `LEAST_CAPACITY`.

    Raises:
        ModelError: they are not.
    """
    experts = None if model.architecture is None else model.architecture.experts
    if experts is None or model.routing is None:
        return
    if not experts.pads_to_capacity:
        raise ModelError(
            f"model.experts.pads_to_capacity: must be true, with a capacity_factor, for {ranks} "
            "native expert ranks of DeepSpeed; drop_tokens = False is not modelled"
        )
    if (capacity := model.routing.capacity) < LEAST_CAPACITY:
        raise ModelError(
            f"model.experts.capacity_factor: {experts.capacity_factor:g} is {capacity} copies for "
            f"an expert, must be at least DeepSpeed's min_capacity of {LEAST_CAPACITY}"
        )


def trained_groups(model: Model, strategy: Strategy) -> list[list[Parameter]]:
    """Return the trained parameters by rule; groups of experts follow all others."""
    trained = [each for each in model.parameters if not each.frozen]
    if not strategy.has_expert_order:
        return by_rule(trained, strategy)
    # as split_params_into_different_moe_groups_for_optimizer of moe/utils.py
    dense = by_rule([each for each in trained if not each.expert], strategy)
    experts = by_rule([each for each in trained if each.expert], strategy)
    return [*dense, *(part for group in experts for part in _parts(group))]


def _parts(group: Sequence[Parameter]) -> list[list[Parameter]]:
    """Return a group of experts in parts of at most `GROUP_ELEMENTS`, in order."""
    numbers: list[int] = []
    filled = number = 0
    for each in group:
        if filled and filled + each.elements > GROUP_ELEMENTS:
            filled, number = 0, number + 1
        filled += each.elements
        numbers.append(number)
    pairs = zip(numbers, group, strict=True)
    return [[each for _, each in own] for _, own in groupby(pairs, key=lambda pair: pair[0])]
