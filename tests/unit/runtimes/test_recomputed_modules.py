"""Modules of Megatron-LM that run again in backward: kept bytes, work, memory, refusals."""

from dataclasses import replace

import pytest
from fitting import fitting

from zsim.config_error import ConfigError
from zsim.model.architecture import Llama
from zsim.model.experts import ExpertKernels, Experts
from zsim.model.model import Model, ModelError, Segment
from zsim.proof import check
from zsim.runtimes.registry import make_schedule
from zsim.strategy.activations import Activations, Checkpointing
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import Train
from zsim_runtimes.megatron.options import Megatron

EXPERTS = Experts(count=8, top_k=2, intermediate_size=6, shared_intermediate_size=4)
TOKENS, HIDDEN = 16, 8
SHAPE = Llama(
    layers=2,
    hidden_size=HIDDEN,
    attention_heads=2,
    sequence_length=TOKENS,
    vocab_size=6,
    intermediate_size=12,
)


def strategy_of(
    modules: object = None,
    *,
    compiled: bool = True,
    kept: Checkpointing = Checkpointing.SELECTIVE,
    **degrees: int,
) -> Strategy:
    options = Megatron(sequence_parallel=True).but(recompute_modules=modules)
    return Strategy(
        parallel=Parallel.of(degrees or {"data": 4, "expert": 2}),
        zero=Zero(stage=1, emulate=options),
        activations=Activations(checkpointing=kept),
        train=Train(
            gradient_accumulation_steps=2,
            precision=Precision.BF16,
            clip_norm=1.0,
            compile=compiled,
        ),
    )


def model_of(strategy: Strategy, experts: Experts | None = EXPERTS) -> Model:
    return fitting(replace(SHAPE, execution=strategy.execution, experts=experts), strategy)


def segments(
    modules: object, experts: Experts | None = EXPERTS, *, compiled: bool = True
) -> tuple[Segment, ...]:
    degrees = {"data": 4, "expert": 1 if experts is None else 2}
    strategy = strategy_of(modules, compiled=compiled).but(
        {f"parallel.{name}": ranks for name, ranks in degrees.items()}
    )
    return model_of(strategy, experts).units[1].segments


def work(found: tuple[Segment, ...], *, backward: bool) -> int:
    return sum(
        kernel.flops for each in found for kernel in (each.backward if backward else each.forward)
    )


def saved(found: tuple[Segment, ...]) -> int:
    return sum(each.saved_bytes for each in found)


@pytest.mark.parametrize("compiled", [False, True])
def test_the_output_of_the_activation_of_experts_is_not_kept(*, compiled: bool) -> None:
    plain, dropped = (segments(each, compiled=compiled) for each in (None, "moe_act"))
    rows = TOKENS * EXPERTS.top_k * EXPERTS.intermediate_size * 2
    tensors = 1 if compiled else 2  # the product; the curve as well
    assert saved(plain) - saved(dropped) == tensors * rows
    assert work(plain, backward=False) == work(dropped, backward=False)
    assert work(plain, backward=True) < work(dropped, backward=True)


@pytest.mark.parametrize("compiled", [False, True])
def test_shared_experts_keep_nothing_and_run_twice(*, compiled: bool) -> None:
    plain, again = (segments(each, compiled=compiled) for each in (None, ["shared_experts"]))
    wide = TOKENS * EXPERTS.shared_intermediate_size * 2
    tensors = 3 if compiled else 4  # gate, up, product; the curve as well
    assert saved(plain) - saved(again) == tensors * wide
    forward = 3 * 2 * TOKENS * HIDDEN * EXPERTS.shared_intermediate_size
    assert work(again, backward=True) - work(plain, backward=True) >= forward


@pytest.mark.parametrize("compiled", [False, True])
def test_an_mlp_runs_again_before_its_backward(*, compiled: bool) -> None:
    plain, again = (segments(each, None, compiled=compiled) for each in (None, "mlp"))
    assert saved(again) < saved(plain)
    assert SHAPE.intermediate_size is not None
    forward = 3 * 2 * TOKENS * HIDDEN * SHAPE.intermediate_size
    more = work(again, backward=True) - work(plain, backward=True)
    assert forward <= more < 1.2 * forward
    # what it has made again exists until the backward of the operator that reads it first
    assert again[0].backward_workspace_bytes > plain[0].backward_workspace_bytes


def test_an_mlp_beside_attention_runs_again_as_well() -> None:
    made = [strategy_of(modules, data=4) for modules in (None, "mlp")]
    plain, again = (
        fitting(
            replace(SHAPE, parallel_residual=True, experts=None, execution=each.execution), each
        )
        .units[1]
        .segments
        for each in made
    )
    assert saved(again) < saved(plain)
    assert work(again, backward=True) > work(plain, backward=True)


@pytest.mark.parametrize("modules", ["moe_act", "moe_act,shared_experts", ["core_attn"], "mlp"])
@pytest.mark.parametrize("compiled", [False, True])
def test_steps_with_recomputed_modules_are_proved(modules: object, *, compiled: bool) -> None:
    strategy = strategy_of(modules, compiled=compiled)
    model = model_of(strategy, replace(EXPERTS, dense_layers=1))
    assert check(make_schedule(model, strategy), model) == ()


@pytest.mark.parametrize("module", ["layernorm", "mla_up_proj", "moe"])
def test_modules_that_are_not_modelled_are_refused(module: str) -> None:
    with pytest.raises(ConfigError, match=f"recompute_modules: {module!r} is not modelled, only"):
        strategy_of([module])


@pytest.mark.parametrize(
    ("strategy", "experts", "why"),
    [
        (strategy_of("mlp", kept=Checkpointing.NONE), EXPERTS, "mlp needs activations.checkpoint"),
        (strategy_of("mlp", kept=Checkpointing.FULL), EXPERTS, "mlp needs activations.checkpoint"),
        (strategy_of("moe_act", data=4), None, "moe_act needs experts with model.experts.kernels"),
        (
            strategy_of("moe_act"),
            replace(EXPERTS, kernels=ExpertKernels.LOOP),
            "moe_act needs experts with model.experts.kernels",
        ),
        (
            strategy_of("shared_experts"),
            replace(EXPERTS, shared_intermediate_size=0),
            "shared_experts needs model.experts.shared_intermediate_size",
        ),
        (
            strategy_of("shared_experts", data=4, tensor=2, expert=4, expert_tensor=1),
            EXPERTS,
            "shared_experts is not modelled with parallel.tensor = 2",
        ),
    ],
)
def test_modules_that_cannot_be_recomputed_are_one_line(
    strategy: Strategy, experts: Experts | None, why: str
) -> None:
    model = model_of(strategy, experts)
    with pytest.raises(ModelError, match=why):
        make_schedule(model, strategy)
