"""Conditions of `--recompute-modules` (`TransformerConfig.__post_init__`, d98e8a64)."""

from collections.abc import Iterator

from zsim.model.experts import ExpertKernels
from zsim.model.model import Model, ModelError
from zsim.strategy.activations import Checkpointing
from zsim.strategy.execution import Float8
from zsim.strategy.strategy import Strategy
from zsim_runtimes.megatron.options import Megatron, RecomputedModule

FIELD = "zero.megatron.recompute_modules"
WHOLE = (RecomputedModule.MLP, RecomputedModule.SHARED_EXPERTS)
"""Modules that run again with their exchanges of tokens."""


def need(model: Model, strategy: Strategy) -> None:
    """Raise ModelError unless the modules can be recomputed.

    Raises:
        ModelError: Megatron-LM refuses a module for this model, or zsim does not model it.
    """
    modules = strategy.options(Megatron).recompute_modules
    if modules is None:
        return
    shown = ", ".join(modules)
    if strategy.activations.checkpointing is not Checkpointing.SELECTIVE:
        raise ModelError(f'{FIELD}: {shown} needs activations.checkpointing = "selective"')
    for module, why in _wrong(model, strategy):
        if module in modules:
            raise ModelError(f"{FIELD}: {module} {why}")


def _wrong(model: Model, strategy: Strategy) -> Iterator[tuple[RecomputedModule, str]]:
    """Yield modules that cannot be recomputed, with the reason."""
    shape, tensor = model.architecture, strategy.parallel.tensor
    experts = None if shape is None else shape.experts
    if experts is None or experts.kernels is ExpertKernels.LOOP:
        yield RecomputedModule.MOE_ACT, 'needs experts with model.experts.kernels = "grouped"'
    if strategy.train.recipe is Float8.DELAYED:
        for module in (RecomputedModule.MOE_ACT, RecomputedModule.LAYERNORM):
            yield module, "is not supported with train.float8 = delayed"
    is_latent = shape is not None and shape.latent is not None
    if not is_latent:
        yield RecomputedModule.MLA_UP_PROJ, "needs model.latent"
    if strategy.train.recipe is not None:  # it would keep compressed tokens, not their casts
        yield RecomputedModule.MLA_UP_PROJ, f"is not modelled with {strategy.train.recipe} products"
    if experts is None:
        yield RecomputedModule.MOE, "needs model.experts"
    if experts is None and not is_latent:
        # TELayerNormColumnParallelLinear of get_gpt_layer_with_transformer_engine_submodules
        why = "needs model.experts or model.latent: other norms are parts of linear layers"
        yield RecomputedModule.LAYERNORM, why
    if experts is None or not experts.shared_intermediate_size:
        yield RecomputedModule.SHARED_EXPERTS, "needs model.experts.shared_intermediate_size"
    for module in WHOLE if tensor > 1 else ():
        yield module, f"is not modelled with parallel.tensor = {tensor}"
