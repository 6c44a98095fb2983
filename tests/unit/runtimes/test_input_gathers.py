"""Gathers of the tokens that linear layers read in FSDP2, the copies around them, and the root."""

from dataclasses import replace

import pytest
from exact_training import proves_and_trains
from fitting import fitting

from zsim.config_error import ConfigError
from zsim.dtype import DType
from zsim.model.architecture import GPT, Llama
from zsim.model.kernel import Kernel, KernelKind
from zsim.model.model import Model
from zsim.model.transformer import transformer
from zsim.proof import check
from zsim.runtimes.registry import make_schedule
from zsim.schedule.operation import AllGather, AllReduce, ReduceScatter
from zsim.schedule.schedule import Schedule
from zsim.strategy.activations import Activations, Checkpointing
from zsim.strategy.execution import Execution
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import Train
from zsim_runtimes.fsdp2.options import FSDP2, InputGathers, OffloadPolicy

LLAMA = Llama(
    layers=2,
    hidden_size=8,
    attention_heads=2,
    sequence_length=4,
    vocab_size=6,
)
TIED_GPT = GPT(
    layers=2,
    hidden_size=8,
    attention_heads=2,
    sequence_length=4,
    vocab_size=7,
    tied_embeddings=True,
)
EACH = Strategy(
    parallel=Parallel(data=2, tensor=2),
    zero=Zero(stage=3, emulate=FSDP2(input_gathers=InputGathers.LINEAR)),
    activations=Activations(checkpointing=Checkpointing.FULL, early_stop=True),
    train=Train(gradient_accumulation_steps=2, precision=Precision.BF16, clip_norm=1.0),
)
COMPILED = EACH.but({"train.compile": True})


def freeing(
    *,
    reshard_after_forward: bool = True,
    reshard_after_backward: bool = True,
    offload_policy: OffloadPolicy = OffloadPolicy.NONE,
) -> Strategy:
    """Return a strategy that frees the root after forward."""
    runtime = FSDP2(
        reshard_root_after_forward=True,
        reshard_after_forward=reshard_after_forward,
        reshard_after_backward=reshard_after_backward,
        offload_policy=offload_policy,
    )
    return EACH.but({"zero.emulate": runtime})


ROOT_FREED = freeing()
WHOLE_EMBEDDING = EACH.but(
    {"zero.emulate": FSDP2(replicate_embedding=True, reduce_dtype=DType.FP32)}
)


def model_of(strategy: Strategy, shape: Llama | GPT = LLAMA) -> Model:
    return fitting(replace(shape, execution=strategy.execution), strategy)


def made_of(strategy: Strategy, shape: Llama | GPT = LLAMA) -> Schedule:
    return make_schedule(model_of(strategy, shape), strategy)


@pytest.mark.matrix(24)
@pytest.mark.parametrize("shape", [LLAMA, TIED_GPT], ids=["Llama", "joined, tied"])
@pytest.mark.parametrize(
    "strategy",
    [
        EACH,
        COMPILED,
        ROOT_FREED,
        WHOLE_EMBEDDING,
        WHOLE_EMBEDDING.but({"activations": Activations()}),
        EACH.but({"activations": Activations()}),
        COMPILED.but({"activations": Activations(checkpointing=Checkpointing.OPERATIONS)}),
        freeing(reshard_after_backward=False),
        freeing(reshard_after_forward=False),
        freeing(offload_policy=OffloadPolicy.CPU),
    ],
    ids=[
        "each layer",
        "compiled",
        "root freed",
        "embedding whole",
        "embedding whole, nothing run again",
        "nothing run again",
        "operations run again",
        "root kept after backward",
        "blocks kept",
        "on the host",
    ],
)
def test_it_trains_what_plain_data_parallelism_does(strategy: Strategy, shape: Llama | GPT) -> None:
    model = model_of(strategy, shape)
    made = make_schedule(model, strategy)
    proves_and_trains(made, model, strategy)


def of_blocks(strategy: Strategy, kind: type[AllGather | ReduceScatter]) -> float:
    """Return how often a block gathers or scatters tokens in a micro-batch."""
    (program,) = made_of(strategy.but({"train.gradient_accumulation_steps": 1})).programs
    ids = [
        each.id
        for each in program.step
        if isinstance(each, kind) and each.group == "tensor" and "/block" in each.id
    ]
    return len(ids) / LLAMA.layers


def test_each_layer_gathers_what_it_reads_and_scatters_the_gradient_of_it() -> None:
    """Of a block run again: q, k, v, gate and up twice, and gradients of attention and MLP.

    A profile of KempnerForge counts as many: 9,679 gathers of 20 micro-batches with 40 blocks, 4
    of which are of the ends (benchmarks/profiling/13b_24gpu_profiling.md at 5666d0d).
    """
    assert of_blocks(EACH, AllGather) == 5 + 5 + 2 == (round(9679 / 20) - 4) / 40
    module = EACH.but({"zero.emulate": FSDP2()})
    assert of_blocks(module, AllGather) == 2 + 2 + 2
    assert of_blocks(EACH, ReduceScatter) - of_blocks(module, ReduceScatter) == 5 - 2


def test_a_block_that_stops_early_does_not_scatter_what_it_makes_last() -> None:
    """Count results of attention twice, those of the MLP once, and the gradients of five inputs.

    The same profile has 6,420 scatters, one of which is of the head in each micro-batch.
    """
    assert of_blocks(EACH, ReduceScatter) == 2 + 1 + 5 == (6420 / 20 - 1) / 40
    whole = EACH.but({"activations.early_stop": False})
    assert of_blocks(whole, ReduceScatter) == 2 + 2 + 5
    assert of_blocks(whole, AllGather) == of_blocks(EACH, AllGather)


def test_without_tokens_that_are_cut_it_does_not_sum_what_it_makes_last() -> None:
    summed = EACH.but({"zero.emulate": FSDP2(enable_sequence_parallel=False)})

    def sums(strategy: Strategy) -> int:
        (program,) = made_of(strategy.but({"train.gradient_accumulation_steps": 1})).programs
        found = [each for each in program.step if isinstance(each, AllReduce)]
        return sum(each.group == "tensor" and "/block" in each.id for each in found)

    whole = summed.but({"activations.early_stop": False})
    assert sums(whole) - sums(summed) == LLAMA.layers
    assert not check(made_of(summed), model_of(summed))


def test_an_embedding_that_is_whole_is_gathered_and_reduced_with_all_its_rows() -> None:
    def embedding(strategy: Strategy) -> tuple[int, ...]:
        return model_of(strategy).units[0].parameters[0].shape

    assert embedding(EACH) == (LLAMA.vocab_size // 2, LLAMA.hidden_size)
    assert embedding(WHOLE_EMBEDDING) == (LLAMA.vocab_size, LLAMA.hidden_size)


def test_a_whole_embedding_needs_tokens_that_are_cut() -> None:
    with pytest.raises(ConfigError, match="replicate_embedding: true needs enable_sequence_para"):
        FSDP2(replicate_embedding=True, enable_sequence_parallel=False)


def test_compiled_layers_that_read_the_same_gather_it_once_and_scatter_gradients_each() -> None:
    """So do graphs of two such layers that torch 2.13 compiles: equal collectives are one."""
    module = COMPILED.but({"zero.emulate": FSDP2()})
    assert of_blocks(COMPILED, AllGather) == of_blocks(module, AllGather)
    assert of_blocks(COMPILED, ReduceScatter) == of_blocks(EACH, ReduceScatter)


def test_compiled_layers_keep_what_they_read_once() -> None:
    def saved(strategy: Strategy) -> list[int]:
        segments = model_of(strategy).units[1].segments
        return [each.saved_bytes for each in segments if each.inputs[0].endswith("ln1")]

    whole = LLAMA.sequence_length * LLAMA.hidden_size * Precision.BF16.compute.size_bytes
    assert saved(EACH) == [whole] * 3
    assert saved(COMPILED) == [whole, 0, 0]


def test_a_root_that_is_freed_is_gathered_again_for_backward() -> None:
    def gathers(strategy: Strategy) -> int:
        (program,) = made_of(strategy).programs
        found = [each for each in program.step if isinstance(each, AllGather)]
        return sum(each.group == "data" for each in found)

    micro_batches = ROOT_FREED.train.gradient_accumulation_steps
    kept = ROOT_FREED.but({"zero.emulate": FSDP2()})
    assert gathers(ROOT_FREED) == (LLAMA.layers + 1) * 2 * micro_batches
    assert gathers(kept) == gathers(ROOT_FREED) - micro_batches


def copies(sequences: int, execution: Execution, *, backward: bool) -> int:
    """Return how many more copies of hidden states of all tokens a block has than otherwise."""

    def count(execution: Execution) -> int:
        model = transformer(
            replace(LLAMA, execution=execution),
            micro_batch_size=sequences,
            tensor=2,
            precision=Precision.BF16,
            sequence=True,
            keeps_gathered=True,
        )
        parts = model.units[1].segments
        kernels: list[Kernel] = []
        for each in parts:
            kernels += each.backward if backward else each.forward
        shape = (sequences * LLAMA.sequence_length, LLAMA.hidden_size)
        return sum(each.kind is KernelKind.ELEMENTWISE and each.shape == shape for each in kernels)

    return count(replace(execution, rearranges=True)) - count(execution)


@pytest.mark.parametrize("execution", [Execution(), Execution(gathers_each=True)])
def test_what_is_gathered_or_scattered_along_tokens_of_several_sequences_is_copied(
    execution: Execution,
) -> None:
    read = 5 if execution.gathers_each else 2
    assert copies(2, execution, backward=False) == read + 2
    assert copies(2, execution, backward=True) == 2 + read


def test_of_one_sequence_only_what_is_scattered_is_copied() -> None:
    assert copies(1, Execution(), backward=False) == copies(1, Execution(), backward=True) == 2


def test_layers_gather_tokens_only_where_these_are_cut() -> None:
    with pytest.raises(ConfigError, match="input_gathers: linear needs enable_sequence_parallel"):
        FSDP2(input_gathers=InputGathers.LINEAR, enable_sequence_parallel=False)
