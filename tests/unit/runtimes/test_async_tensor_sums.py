"""Column-parallel layers of Megatron-LM whose backward runs beside NCCL's collectives."""

from collections.abc import Callable

import pytest
from exact_training import proves_and_trains
from fitting import fitting
from misordered_parts import rewritten_everywhere
from token_ranks import LLAMA, TIED_GPT

from zsim.config_error import ConfigError
from zsim.model.architecture import Architecture, NormPlacement
from zsim.model.kernel import FusedPart, Kernel, KernelKind
from zsim.model.model import Model, ModelError
from zsim.model.pipeline_stages import in_blocks
from zsim.proof import check
from zsim.runtimes.registry import make_schedule
from zsim.schedule.json import decode_value, encode_value
from zsim.schedule.operation import (
    AllGather,
    AllReduce,
    CollectiveOperation,
    Compute,
    Copy,
    Free,
    Operation,
    ReduceScatter,
)
from zsim.schedule.replace import replace
from zsim.schedule.schedule import Schedule, ScheduleError
from zsim.strategy.activations import Checkpointing
from zsim.strategy.execution import Float8
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import Train
from zsim_runtimes.megatron.options import Megatron

WHOLE = Megatron(async_tensor_model_parallel_allreduce=True)
CUT = WHOLE.but(sequence_parallel=True)
CHUNKS = CUT.but(num_layers_per_virtual_pipeline_stage=1)
BESIDE = Strategy(
    parallel=Parallel(data=2, tensor=2),
    zero=Zero(stage=1, emulate=CUT),
    train=Train(gradient_accumulation_steps=2, precision=Precision.BF16, clip_norm=1.0),
)
SUMMED = BESIDE.but({"zero.emulate": WHOLE})
PLAIN = BESIDE.but({"zero.emulate": Megatron(sequence_parallel=True)})
PARALLEL_GPT = replace(TIED_GPT, parallel_residual=True, shared_norm=True)
NORMS_BEHIND = replace(LLAMA, norm_placement=NormPlacement.AFTER)


def model_of(strategy: Strategy, shape: Architecture = LLAMA, *, sequences: int = 2) -> Model:
    return fitting(replace(shape, execution=strategy.execution), strategy, sequences=sequences)


def made_of(strategy: Strategy) -> Schedule:
    return make_schedule(model_of(strategy), strategy)


@pytest.mark.matrix(24)
@pytest.mark.parametrize("shape", [LLAMA, TIED_GPT, PARALLEL_GPT, NORMS_BEHIND])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"zero.stage": 0, "zero.emulate": WHOLE},
        {"parallel.context": 2},
        {"parallel.context": 2, "parallel.context_exchange": "all_gather"},
        {"activations.checkpointing": Checkpointing.FULL},
        {"activations.checkpointing": Checkpointing.SELECTIVE, "zero.emulate": WHOLE},
    ],
)
def test_it_trains_what_plain_data_parallelism_does(
    changes: dict[str, object], shape: Architecture
) -> None:
    strategy = BESIDE.but(changes)
    model = model_of(strategy, shape)
    made = make_schedule(model, strategy)
    proves_and_trains(made, model, strategy)


@pytest.mark.matrix(6)
@pytest.mark.parametrize("options", [WHOLE, CUT, CHUNKS])
def test_stages_of_a_pipeline_sum_beside_products(options: Megatron) -> None:
    strategy = BESIDE.but({"parallel.pipeline": 2, "zero.emulate": options})
    model = in_blocks(model_of(strategy, replace(LLAMA, layers=4)))
    made = make_schedule(model, strategy)
    assert not check(made, model)
    assert beside(made)


def tensor_collectives(made: Schedule, unit: str) -> list[CollectiveOperation]:
    """Return those over the tensor axis of a unit's first micro-batch."""
    return [
        each
        for each in made.programs[0].step
        if isinstance(each, CollectiveOperation) and f"/mb0/{unit}/" in each.id
        if each.group == "tensor"
    ]


def beside(made: Schedule) -> list[CollectiveOperation]:
    step = made.programs[0].step
    return [each for each in step if isinstance(each, CollectiveOperation) and each.beside]


@pytest.mark.parametrize(("unit", "layers"), [("block0", 2), ("head", 1)])
def test_backward_gathers_what_was_read_and_scatters_its_gradient_beside_products(
    unit: str, layers: int
) -> None:
    # Of a block the row-parallel layer behind gathers its gradient first, which nothing hides.
    found = tensor_collectives(made_of(BESIDE), unit)
    hidden = [each for each in found if each.beside]
    assert [type(each) for each in hidden] == [AllGather, ReduceScatter] * layers
    assert {each.stream for each in hidden} == {"token_collectives"}
    assert all("/backward/" in each.id for each in hidden)
    assert {each.stream for each in found if not each.beside} == {"compute"}


@pytest.mark.parametrize(("unit", "layers"), [("block0", 2), ("head", 1)])
def test_whole_hidden_states_have_their_gradients_summed_beside_products(
    unit: str, layers: int
) -> None:
    hidden = [each for each in tensor_collectives(made_of(SUMMED), unit) if each.beside]
    assert [type(each) for each in hidden] == [AllReduce] * layers


def test_one_rank_has_nothing_beside_products() -> None:
    made = made_of(BESIDE.but({"parallel.tensor": 1, "zero.emulate": WHOLE}))
    assert not beside(made)
    assert "token_collectives" not in made.streams


def test_the_same_goes_over_the_wire_and_is_computed() -> None:
    one, other = made_of(BESIDE), made_of(PLAIN)
    assert one.contract.wire_bytes == other.contract.wire_bytes
    fused, alone = model_of(BESIDE), model_of(PLAIN)
    assert fused.forward_flops == alone.forward_flops
    assert fused.backward_flops == alone.backward_flops


def products(model: Model, place: int, *, backward: bool = False) -> list[Kernel]:
    """Return the products of a segment of the first block."""
    segment = next(each for each in model.units if each.name == "block0").segments[place]
    kernels = segment.backward if backward else segment.forward
    return [each for each in kernels if each.kind is KernelKind.MATMUL]


def test_query_key_and_value_are_one_product_each_way() -> None:
    # Of width 8, 4 elements for each of two ranks' query, key and value, of 8 tokens.
    model = model_of(BESIDE)
    assert [each.shape for each in products(model, 1)] == [(1, 8, 12, 8), (1, 8, 8, 4)]
    backward = products(model, 1, backward=True)
    assert [(each.part, each.shape, each.spared) for each in backward] == [
        (None, (1, 8, 4, 8), 0),
        (None, (1, 8, 4, 8), 0),
        (FusedPart.BESIDE_GATHER, (1, 8, 8, 12), 0),
        (FusedPart.BESIDE_SCATTER, (1, 12, 8, 8), 0),
    ]


def test_what_is_not_cut_is_not_gathered() -> None:
    parts = {each.part for each in products(model_of(SUMMED), 1, backward=True)}
    assert parts == {None, FusedPart.BESIDE_SCATTER}


@pytest.mark.parametrize("options", [CUT, Megatron(sequence_parallel=True, tp_comm_overlap=True)])
def test_frozen_weights_are_refused_by_name(options: Megatron) -> None:
    strategy = BESIDE.but({"zero.emulate": options})
    model = model_of(strategy, replace(LLAMA, frozen=("block0.*",)))
    with pytest.raises(ModelError, match="frozen parameters are not modelled for Megatron"):
        make_schedule(model, strategy)


def test_products_in_8_bit_floats_have_it_too() -> None:
    strategy = BESIDE.but({"train.float8": Float8.TENSORWISE})
    model = model_of(strategy)
    assert not check(make_schedule(model, strategy), model)
    assert FusedPart.BESIDE_SCATTER in {each.part for each in products(model, 1, backward=True)}


def test_userbuffers_have_their_own() -> None:
    with pytest.raises(ConfigError, match="async_tensor_model_parallel_allreduce: true is instead"):
        CUT.but(tp_comm_overlap=True)


def read_before_it_is_gathered(operation: Operation) -> Operation:
    if isinstance(operation, Compute):
        after = tuple(each for each in operation.after if "/gather/" not in str(each))
        return replace(operation, after=after)
    return operation


def gone_on_before_it_is_summed(operation: Operation) -> Operation:
    if isinstance(operation, Compute | Copy):
        after = tuple(each for each in operation.after if "/sum/" not in str(each))
        return replace(operation, after=after)
    return operation


def given_back_while_it_is_scattered(operation: Operation) -> Operation:
    if isinstance(operation, Free):
        return replace(operation, uses=())
    return operation


def gathered_before_memory_is_free(operation: Operation) -> Operation:
    if isinstance(operation, AllGather) and operation.beside:
        return replace(operation, after=())
    return operation


def summed_before_it_is_made(operation: Operation) -> Operation:
    if isinstance(operation, ReduceScatter | AllReduce) and operation.beside:
        return replace(operation, after=())
    return operation


@pytest.mark.parametrize(
    ("strategy", "change"),
    [
        (SUMMED, gone_on_before_it_is_summed),
        (BESIDE, given_back_while_it_is_scattered),
        (BESIDE, gathered_before_memory_is_free),
    ],
)
def test_what_is_read_before_it_is_there_is_found(
    strategy: Strategy, change: Callable[[Operation], Operation]
) -> None:
    model = model_of(strategy)
    assert check(rewritten_everywhere(make_schedule(model, strategy), change), model)


@pytest.mark.parametrize(
    ("strategy", "change"),
    [
        (BESIDE, read_before_it_is_gathered),
        (BESIDE, summed_before_it_is_made),
        (SUMMED, summed_before_it_is_made),
    ],
)
def test_a_collective_beside_products_is_beside_a_compute(
    strategy: Strategy, change: Callable[[Operation], Operation]
) -> None:
    with pytest.raises(ScheduleError, match="beside a Compute, but fused with no Compute"):
        rewritten_everywhere(made_of(strategy), change)


def test_what_is_whole_is_not_in_parts() -> None:
    with pytest.raises(ValueError, match="in parts, or whole beside a Compute, not both"):
        replace(beside(made_of(BESIDE))[0], in_parts=True)


def test_a_file_has_all_of_it() -> None:
    made = made_of(BESIDE)
    assert decode_value(encode_value(made, Schedule), Schedule) == made
