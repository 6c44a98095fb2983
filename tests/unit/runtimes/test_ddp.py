"""DistributedDataParallel: buckets as torch assigns them, memory, and refusals in one line."""

import itertools

import pytest
import torch
import torch.distributed as dist
from drawn_examples import examples
from hypothesis import given
from hypothesis import strategies as st

from zsim.model.architecture import GPT
from zsim.model.model import ModelError, Parameter
from zsim.model.transformer import transformer
from zsim.proof import check
from zsim.runtimes.registry import make_schedule
from zsim.schedule.operation import AllReduce
from zsim.schedule.schedule_writer import POOL
from zsim.strategy.activations import Activations, Checkpointing
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import Train
from zsim_plan.bounds.memory_bounds import device_bytes
from zsim_runtimes.ddp.assignment import assigned, buckets_of
from zsim_runtimes.ddp.options import DDP, CommunicationHook

SHAPE = GPT(layers=3, hidden_size=16, attention_heads=2, sequence_length=8, vocab_size=32)


def strategy(
    options: DDP, *, precision: Precision = Precision.FP32, micro_batches: int = 1
) -> Strategy:
    return Strategy(
        parallel=Parallel(data=4),
        zero=Zero(stage=0, emulate=options),
        train=Train(precision=precision, gradient_accumulation_steps=micro_batches),
    )


def peak(chosen: Strategy) -> int:
    model = transformer(SHAPE, micro_batch_size=1, precision=chosen.train.precision)
    made = make_schedule(model, chosen)
    assert check(made, model) == ()
    return next(peak for _, pool, peak in made.contract.peak_bytes if pool == POOL)


@given(
    st.lists(st.integers(1, 400), min_size=1, max_size=12),
    st.sampled_from([(100, 900), (400, 400), (1, 1), (10**6, 10**6)]),
)
@examples(100)
def test_buckets_are_those_that_torch_assigns(sizes: list[int], limits: tuple[int, int]) -> None:
    tensors = [torch.empty(size) for size in sizes]
    parameters = [Parameter(name=str(at), shape=(size,)) for at, size in enumerate(sizes)]
    wanted, _ = vars(dist)["_compute_bucket_assignment_by_size"](
        tensors, list(limits), [False] * len(sizes), list(range(len(sizes)))
    )
    found = assigned(parameters, limits, tensors[0].element_size())
    assert [[int(each.name) for each in bucket] for bucket in found] == wanted


def test_a_module_in_ddp_reduces_the_same_buckets_from_its_second_step_on(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    store = vars(dist)["FileStore"](str(tmp_path_factory.mktemp("ddp") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        widths = [8, 64, 16, 64, 8]
        pairs = itertools.pairwise(widths)
        module = torch.nn.Sequential(*(torch.nn.Linear(*pair) for pair in pairs))
        wrapped = torch.nn.parallel.DistributedDataParallel(module, bucket_cap_mb=0.003)
        for _ in range(3):
            wrapped(torch.ones(1, 8)).sum().backward()
        logged = vars(type(wrapped))["_get_ddp_logging_data"](wrapped)
        named = reversed(list(module.named_parameters()))
        parameters = [Parameter(name=name, shape=tuple(each.shape)) for name, each in named]
        found = assigned(parameters, DDP(bucket_cap_mb=0.003).limits, 4)
    finally:
        dist.destroy_process_group()
    sizes = ", ".join(str(4 * sum(each.elements for each in bucket)) for bucket in found)
    assert logged["rebuilt_bucket_sizes"] == sizes
    assert len(found) > 1


def test_buckets_stay_in_reverse_order_while_ddp_looks_for_unused_parameters() -> None:
    model = transformer(SHAPE, micro_batch_size=1, precision=Precision.FP32)
    cap = 0.001
    rebuilt = buckets_of(model, DDP(bucket_cap_mb=cap), 4)
    first = buckets_of(model, DDP(bucket_cap_mb=cap, find_unused_parameters=True), 4)
    assert rebuilt[0][0].name == [each.name for each in model.units[-1].parameters][-1]
    assert first[-1][0].name == model.parameters[0].name
    static = DDP(bucket_cap_mb=cap, find_unused_parameters=True, static_graph=True)
    assert buckets_of(model, static, 4) == rebuilt


def test_views_of_buckets_save_the_memory_of_gradients() -> None:
    whole = sum(
        each.elements
        for each in transformer(SHAPE, micro_batch_size=1, precision=Precision.FP32).parameters
    )
    for precision in (Precision.FP32, Precision.BF16):
        apart = peak(strategy(DDP(), precision=precision))
        views = peak(strategy(DDP(gradient_as_bucket_view=True), precision=precision))
        assert apart - views == pytest.approx(4 * whole, rel=0.05)


def test_no_sync_reduces_once_a_step() -> None:
    counts: dict[bool, int] = {}
    for quiet in (True, False):
        chosen = strategy(DDP(no_sync=quiet), micro_batches=3)
        model = transformer(SHAPE, micro_batch_size=1, precision=Precision.FP32)
        program = make_schedule(model, chosen).programs[0]
        counts[quiet] = sum(isinstance(each, AllReduce) for each in program.step)
    assert counts[False] == 3 * counts[True]


def test_the_lower_bound_of_memory_holds() -> None:
    for precision in Precision:
        for checkpointing in (Checkpointing.NONE, Checkpointing.FULL):
            chosen = strategy(DDP(), precision=precision)
            chosen = chosen.but(activations=Activations(checkpointing=checkpointing))
            model = transformer(SHAPE, micro_batch_size=1, precision=precision)
            assert device_bytes(model, chosen) <= peak(chosen)


def test_a_hook_of_another_16_bit_format_is_refused() -> None:
    hooked = DDP(comm_hook=CommunicationHook.BF16_COMPRESS)
    model = transformer(SHAPE, micro_batch_size=1, precision=Precision.FP16)
    with pytest.raises(ModelError) as caught:
        make_schedule(model, strategy(hooked, precision=Precision.FP16))
    assert str(caught.value) == (
        "zero.ddp.comm_hook: bf16_compress is not modelled for fp16; say fp16_compress"
    )
