"""Modules of Megatron-LM that run again in backward: kept bytes, work, memory, refusals."""

from collections import Counter
from dataclasses import replace

import pytest
from faults.schedules import edited
from fitting import fitting

from zsim.config_error import ConfigError
from zsim.model.architecture import Llama
from zsim.model.experts import ExpertKernels, Experts, Latent
from zsim.model.model import Model, ModelError, Segment
from zsim.model.pipeline_stages import in_blocks
from zsim.proof import check
from zsim.runtimes.registry import make_schedule
from zsim.schedule.operation import Allocate, AllToAll, Compute, Free, walk
from zsim.schedule.program import ScheduleError
from zsim.schedule.schedule import Schedule
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


def test_modules_of_other_layers_are_refused() -> None:
    with pytest.raises(ConfigError, match="recompute_modules"):
        strategy_of(["gdn_norm_out"])


LATENT = Latent(key_value_rank=4, query_rank=4, nope_size=4, rope_size=2, value_size=4)
MODULES = ("layernorm", "mla_up_proj", "moe", "layernorm,mla_up_proj,moe", "layernorm,moe_act")
PLACES: tuple[dict[str, int], ...] = (
    {"data": 4, "expert": 2},
    {"data": 4},
    {"data": 4, "tensor": 2, "expert": 2},
    {"data": 4, "tensor": 2, "expert": 4, "expert_tensor": 1, "pipeline": 2},
)


def placed(modules: object, degrees: dict[str, int], *, compiled: bool = True) -> Strategy:
    """Return a strategy on these ranks."""
    ranks = {"data": 4, "expert": 1, **degrees}
    return strategy_of(modules, compiled=compiled).but(
        {f"parallel.{name}": count for name, count in ranks.items()}
    )


def latent_model(strategy: Strategy, experts: Experts | None = EXPERTS) -> Model:
    shape = replace(SHAPE, latent=LATENT, experts=experts, execution=strategy.execution)
    model = fitting(shape, strategy)
    return in_blocks(model) if strategy.parallel.pipeline > 1 else model


@pytest.mark.parametrize("modules", MODULES)
@pytest.mark.parametrize("degrees", PLACES)
@pytest.mark.parametrize("compiled", [False, True])
def test_modules_that_run_again_before_backward_are_proved(
    modules: str, degrees: dict[str, int], *, compiled: bool
) -> None:
    strategy = placed(modules, degrees, compiled=compiled)
    dense = 1 if strategy.parallel.pipeline == 1 else 0  # each stage needs experts
    experts = replace(EXPERTS, score_bias=True, z_loss=True, dense_layers=dense)
    model = latent_model(strategy, experts)
    assert check(make_schedule(model, strategy), model) == ()


def visits(modules: str, **degrees: int) -> list[tuple[str, int]]:
    """Return actions and segments of the second block in the last backward."""
    strategy = placed(modules, degrees)
    (program,) = make_schedule(latent_model(strategy), strategy).programs
    return [
        (each.action.value, each.segment)
        for each in walk(program.step)
        if isinstance(each, Compute) and each.id.startswith("step/backward/mb1/block1/")
    ]


def test_norms_run_again_before_the_backward_of_their_module() -> None:
    """Norms are segments 0 and 2; attention is 1, experts are the others, with the sum."""
    assert visits("layernorm", data=4, expert=2) == [
        ("recompute", 2),
        *(("backward", segment) for segment in (6, 5, 4, 3, 2)),
        ("recompute", 0),
        ("backward", 1),
        ("backward", 0),
    ]


def test_experts_run_again_as_a_whole_before_the_sum_of_their_block() -> None:
    """The loss of the router runs again alone: forward is without gradients."""
    found = visits("moe", data=4, expert=2)
    run = [segment for action, segment in found if action == "recompute"]
    assert run == [1, 2, 3, 4]
    assert found[: len(run)] == [("recompute", segment) for segment in run]
    strategy = strategy_of("moe", data=4, expert=2)
    schedule = make_schedule(latent_model(strategy), strategy)
    exchanges = Counter(
        each.id.split("/")[1]
        for each in walk(schedule.programs[0].step)
        if isinstance(each, AllToAll)
    )
    assert exchanges == {"forward": 2 * 2 * 3, "backward": 2 * 2 * (3 + 3)}
    assert schedule.contract.repeats_routing


@pytest.mark.parametrize("module", ["layernorm", "moe"])
def test_what_runs_again_keeps_nothing(module: str) -> None:
    """A block keeps the input of its norm, or of its experts, as with them dropped."""
    kept: dict[str | None, set[str]] = {}
    for modules in (None, module):
        strategy = strategy_of(modules, data=4, expert=2)
        (program,) = make_schedule(latent_model(strategy), strategy).programs
        forward = [each for each in walk(program.step) if each.id.startswith("step/forward/mb0")]
        alive: set[str] = set()
        for each in forward:
            if isinstance(each, Allocate):
                alive.add(each.buffer)
            elif isinstance(each, Free):
                alive.discard(each.buffer)
        kept[modules] = {name for name in alive if name.startswith("block0/")}
    lost = {name.removeprefix("block0/") for name in kept[None]}
    left = {name.removeprefix("block0/") for name in kept[module]}
    if module == "layernorm":
        assert {"ln1", "ln2"} & left == set()
        assert "sum" in left
    else:
        assert "ln2" in left
        assert not any(name.startswith(("experts", "shared")) for name in left)
        assert any(name.startswith("experts") for name in lost)


@pytest.mark.parametrize("tensor", [1, 2])
def test_expanded_heads_are_not_kept_and_are_made_twice(tensor: int) -> None:
    """Queries and keys with positions, and the layer with keys and values, of each head."""
    degrees = {"data": 4, "expert": 2} | ({"tensor": tensor} if tensor > 1 else {})
    plain, again = (
        latent_model(placed(modules, degrees)).units[1].segments
        for modules in (None, "mla_up_proj")
    )
    heads = 2 // tensor
    of_token = heads * (2 * LATENT.head_size + LATENT.nope_size + LATENT.value_size)
    assert saved(plain) - saved(again) == TOKENS * of_token * 2
    ups = LATENT.query_rank * LATENT.head_size if LATENT.query_rank else 0
    ups += LATENT.key_value_rank * (LATENT.nope_size + LATENT.value_size)
    more = work(again, backward=True) - work(plain, backward=True)
    assert more >= 2 * TOKENS * heads * ups
    assert work(again, backward=False) == work(plain, backward=False)


def without(schedule: Schedule, operation: str) -> Schedule:
    """Return the schedule without the operation of this id."""
    return edited(schedule, lambda each: () if each.id == operation else (each,))


@pytest.mark.parametrize("modules", ["layernorm", "moe"])
def test_a_module_that_does_not_run_again_is_found(modules: str) -> None:
    """But for a loss, which no operation reads, and whose backward computes it again."""
    strategy = strategy_of(modules, data=4, expert=2)
    model = latent_model(strategy)
    schedule = make_schedule(model, strategy)
    again = [
        each
        for each in walk(schedule.programs[0].step)
        if isinstance(each, Compute) and each.action.value == "recompute"
        if model.units[2].segments[each.segment].loads is None
    ]
    for one in again:
        try:
            faulty = without(schedule, one.id)
        except ScheduleError:
            continue  # another operation waits for it
        assert check(faulty, model), one.id


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
        (strategy_of("mla_up_proj"), EXPERTS, "mla_up_proj needs model.latent"),
        (strategy_of("moe", data=4), None, "moe needs model.experts"),
        (
            strategy_of("layernorm", data=4),
            None,
            "layernorm needs model.experts or model.latent: other norms are parts of linear layers",
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
