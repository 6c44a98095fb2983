"""Blocks whose experts every rank gathers: FSDP and ZeRO-3 without expert ranks."""

from dataclasses import replace

import pytest
from fitting import fitting

from zsim.model.architecture import Llama
from zsim.model.experts import ExpertKernels, Experts
from zsim.model.kernel import KernelKind
from zsim.model.model import Model
from zsim.proof import check
from zsim.runtimes.registry import make_schedule
from zsim.schedule.operation import AllToAll, ReadCounts, walk
from zsim.strategy.precision import Precision
from zsim.strategy.runtime_options import RuntimeOptions
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import Train
from zsim_runtimes.deepspeed.options import DeepSpeed
from zsim_runtimes.fsdp1.options import FSDP1
from zsim_runtimes.fsdp2.options import FSDP2

RANKS = 4
EXPERTS = Experts(count=8, top_k=2, intermediate_size=16, normalised=True)
SHAPE = Llama(
    layers=2,
    hidden_size=8,
    attention_heads=2,
    sequence_length=16,
    vocab_size=32,
    experts=EXPERTS,
    tied_embeddings=False,
)
RUNTIMES: dict[str, RuntimeOptions] = {
    "fsdp1": FSDP1(),
    "fsdp2": FSDP2(),
    "deepspeed": DeepSpeed(stage3_param_persistence_threshold=0),
}


def strategy_of(runtime: RuntimeOptions) -> Strategy:
    return Strategy(
        parallel=Parallel(data=RANKS),
        zero=Zero(stage=3, emulate=runtime),
        train=Train(precision=Precision.BF16),
    )


def model_of(strategy: Strategy, kernels: ExpertKernels = ExpertKernels.GROUPED) -> Model:
    shape = replace(SHAPE, experts=replace(EXPERTS, kernels=kernels))
    return fitting(replace(shape, execution=strategy.execution), strategy)


@pytest.mark.parametrize("kernels", ExpertKernels)
@pytest.mark.parametrize("name", RUNTIMES)
def test_steps_that_gather_all_experts_are_proved(name: str, kernels: ExpertKernels) -> None:
    strategy = strategy_of(RUNTIMES[name])
    model = model_of(strategy, kernels)
    schedule = make_schedule(model, strategy)
    assert check(schedule, model) == ()
    operations = [*walk(schedule.programs[0].step)]
    assert not any(isinstance(each, AllToAll | ReadCounts) for each in operations)


@pytest.mark.parametrize("name", RUNTIMES)
def test_traffic_does_not_depend_on_tokens_and_has_all_experts(name: str) -> None:
    """A layer is gathered for each pass: 3 E F H elements, in bf16."""
    strategy = strategy_of(RUNTIMES[name])
    model = model_of(strategy)
    sent: dict[str, int] = {}
    for factor in (1, 2):
        longer = replace(SHAPE, sequence_length=factor * SHAPE.sequence_length)
        fitted = fitting(replace(longer, execution=strategy.execution), strategy)
        contract = make_schedule(fitted, strategy).contract
        found = {
            each.collective: each.bytes
            for each in contract.wire_bytes or ()
            if each.group == "data" and not each.scalar
        }
        assert sent in ({}, found)
        sent = found
    dense = sum(each.elements for each in model.parameters if not each.expert)
    experts = SHAPE.layers * 3 * EXPERTS.count * EXPERTS.intermediate_size * SHAPE.hidden_size
    share = 2 * (RANKS - 1) / RANKS
    # DeepSpeed keeps parameters of a model this small from forward to backward
    passes = 1 if name == "deepspeed" else 2
    assert (
        passes * experts * share <= sent["all_gather"] <= (passes * (experts + 1.1 * dense) * share)
    )
    assert experts * share <= sent["reduce_scatter"] <= (experts + 1.1 * dense) * share


def test_a_loop_has_products_for_each_expert() -> None:
    strategy = strategy_of(FSDP2())

    def products(kernels: ExpertKernels, kind: KernelKind) -> int:
        return sum(
            kernel.kind is kind
            for segment in model_of(strategy, kernels).units[1].segments
            for kernel in segment.forward
        )

    grouped = products(ExpertKernels.GROUPED, KernelKind.GROUPED_MATMUL)
    assert grouped == 2  # both halves of the activation are one product
    plain = products(ExpertKernels.GROUPED, KernelKind.MATMUL)
    assert products(ExpertKernels.LOOP, KernelKind.MATMUL) == plain + 2 * EXPERTS.count
    assert not products(ExpertKernels.LOOP, KernelKind.GROUPED_MATMUL)
