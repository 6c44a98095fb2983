"""Built mixtures of experts with counted tokens: tensor ranks, capacities, imbalance, sizes."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from exact_training import cluster
from fitting import fitting
from hypothesis import given, settings
from hypothesis import strategies as st

import zsim
from zsim.backend.backend import Job
from zsim.memory.ledger import memory_ledger
from zsim.memory.peak import peak_bytes
from zsim.mistake import MistakeError
from zsim.model.architecture import Llama
from zsim.model.experts import Experts
from zsim.model.kernel import KernelKind
from zsim.model.model import Model, ModelError
from zsim.model.transformer import transformer
from zsim.proof import check
from zsim.runtimes.registry import make_schedule
from zsim.schedule.bind import bound
from zsim.schedule.binding import Balanced, Binding, CountPlace, CountTrace, Ratio, Zipf
from zsim.schedule.operation import AllToAll, Compute, ReadCounts, walk
from zsim.schedule.schedule import Schedule
from zsim.strategy.activations import Activations, Checkpointing
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import Train
from zsim_des.simulation import SimBackend
from zsim_runtimes.megatron.options import Megatron

EXPERTS = Experts(count=8, top_k=2, intermediate_size=6, shared_intermediate_size=4)
SHAPE = Llama(
    layers=2, hidden_size=8, attention_heads=2, sequence_length=16, vocab_size=6, experts=EXPERTS
)
MEGATRON = Zero(stage=1, emulate=Megatron(sequence_parallel=True))


def strategy_of(
    zero: Zero = MEGATRON, kept: Checkpointing = Checkpointing.NONE, /, **degrees: int
) -> Strategy:
    return Strategy(
        parallel=Parallel.of(degrees),
        zero=zero,
        activations=Activations(checkpointing=kept),
        train=Train(
            gradient_accumulation_steps=2, precision=Precision.BF16, clip_norm=1.0, compile=True
        ),
    )


def model_of(strategy: Strategy, experts: Experts = EXPERTS) -> Model:
    return fitting(replace(SHAPE, execution=strategy.execution, experts=experts), strategy)


@pytest.mark.parametrize(
    ("zero", "degrees"),
    [
        (MEGATRON, {"data": 4, "tensor": 2, "expert": 4, "expert_tensor": 1}),
        (MEGATRON, {"data": 2, "tensor": 2, "expert": 2, "expert_tensor": 1}),
        (MEGATRON, {"data": 2, "tensor": 2, "expert_tensor": 1}),
        (MEGATRON, {"data": 4, "context": 2, "tensor": 2, "expert": 8, "expert_tensor": 1}),
        (
            Zero(stage=3, sequence_parallel=True),
            {"data": 2, "tensor": 2, "expert": 4, "expert_tensor": 1},
        ),
    ],
)
@pytest.mark.parametrize("gate", [False, True])
def test_tensor_ranks_that_route_their_own_tokens_are_proved(
    zero: Zero, degrees: dict[str, int], *, gate: bool
) -> None:
    strategy = strategy_of(zero, **degrees)
    model = model_of(strategy, replace(EXPERTS, shared_gate=gate))
    assert check(make_schedule(model, strategy), model) == ()


def test_tensor_ranks_hold_parts_of_shared_experts_and_copies_of_routers() -> None:
    alone, both = (
        strategy_of(data=4, expert=4),
        strategy_of(data=4, tensor=2, expert=4, expert_tensor=1),
    )
    whole, part = model_of(alone), model_of(both)
    assert whole.parameter_count == part.parameter_count
    assert {
        each.name.split(".")[-2]: each.tensor_sharded
        for each in part.parameters
        if "shared" in each.name or "router" in each.name
    } == {"gate": True, "up": True, "down": True, "router": False}
    assert whole.routing is not None
    assert part.routing is not None
    assert whole.routing.sent == 2 * part.routing.sent


@pytest.mark.parametrize(
    ("experts", "reads"),
    [
        (replace(EXPERTS, capacity_factor=1.25), True),
        (replace(EXPERTS, capacity_factor=1.25, pads_to_capacity=True), False),
    ],
)
@pytest.mark.parametrize("kept", [Checkpointing.NONE, Checkpointing.FULL])
def test_capacities_are_proved_and_padded_ones_need_no_host(
    experts: Experts, kept: Checkpointing, *, reads: bool
) -> None:
    strategy = strategy_of(MEGATRON, kept, data=4, expert=4)
    model = model_of(strategy, experts)
    schedule = make_schedule(model, strategy)
    assert check(schedule, model) == ()
    (program,) = schedule.programs
    waits = [each for each in walk(program.step) if isinstance(each, ReadCounts)]
    assert len(waits) == (2 * 2 if reads else 0)  # layers and micro-batches
    (count,) = schedule.counts
    assert count.maximum == 8 * 5  # 16 x 2 / 8 x 1.25 copies of each expert
    assert count.sent == (32 if reads else 40)


@cache
def made(factor: float | None = None) -> tuple[Schedule, Model]:
    strategy = strategy_of(data=8, expert=4)
    model = model_of(strategy, replace(EXPERTS, capacity_factor=factor))
    return make_schedule(model, strategy), model


def peak(schedule: Schedule, binding: Binding) -> int:
    programs = bound(schedule, binding).schedule.programs
    return max(peak_bytes(memory_ledger(each, 1), schedule.pools[0].name) for each in programs)


def written_out(schedule: Schedule, binding: Binding) -> CountTrace:
    """Return the numbers of a binding for each rank, without classes of ranks."""
    (count,) = schedule.counts
    rows: list[tuple[int, int, int, int, int, int]] = []
    for batch in range(2):
        for layer in range(2):
            for group in range(2):
                numbers = binding.counts(count, CountPlace(batch, layer, group, 4)).tolist()
                rows += [
                    (batch, layer, group, source, expert, copies)
                    for source, row in enumerate(numbers)
                    for expert, copies in enumerate(row)
                ]
    return CountTrace(rows=tuple(rows))


@settings(max_examples=8, deadline=None)
@given(st.floats(1, 2))
def test_two_classes_of_ranks_are_as_all_ranks(busiest: float) -> None:
    schedule, model = made()
    folded, every = Ratio(busiest=busiest), written_out(schedule, Ratio(busiest=busiest))
    times: list[float] = []
    for binding in (folded, every):
        numbers = bound(schedule, binding)
        assert len(numbers.schedule.programs) <= (2 if binding is folded else 8)
        job = Job(schedule=numbers.schedule, model=model, cluster=cluster(8), steps=1)
        times += SimBackend().step_ends_ps(job)
    assert times[0] == pytest.approx(times[1], rel=0.02)


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 99), st.floats(1, 2), st.sampled_from([None, 1.0, 1.5]))
def test_no_numbers_within_the_maximum_need_more_than_the_promised_memory(
    seed: int, busiest: float, factor: float | None
) -> None:
    schedule, _ = made(factor)
    promised = max(size for _, _, size in schedule.contract.peak_bytes)
    ratio = written_out(schedule, Ratio(busiest=busiest))  # classes may have one row more
    for binding in (Zipf(seed=seed, busiest=busiest), ratio, Balanced()):
        found = bound(schedule, binding)
        if found.excess is None:
            assert peak(schedule, binding) <= promised
        assert factor is None or found.excess is None  # a capacity bounds what arrives


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 99), st.floats(1, 3), st.sampled_from([1.0, 1.5]))
def test_a_capacity_bounds_the_rows_and_the_work_of_each_expert(
    seed: int, busiest: float, factor: float
) -> None:
    schedule, _ = made(factor)
    (count,) = schedule.counts
    most = 4 * count.capacity  # from each source
    found = bound(schedule, Zipf(seed=seed, busiest=busiest)).schedule
    for program in found.programs:
        for operation in walk(program.step):
            if isinstance(operation, AllToAll) and operation.sent:
                assert sum(operation.sent) == operation.source.size
            if isinstance(operation, Compute):
                for kernel in operation.kernels:
                    if kernel.kind is KernelKind.GROUPED_MATMUL:
                        assert kernel.loads is not None
                        assert kernel.loads.most <= most


def test_kernels_and_memory_of_experts_follow_the_rows_that_a_rank_receives() -> None:
    schedule, _ = made()
    found = bound(schedule, Ratio(busiest=1.5)).schedule
    rows = [
        {
            kernel.shape[1]
            for operation in walk(program.step)
            if isinstance(operation, Compute)
            for kernel in operation.kernels
            if kernel.kind is KernelKind.GROUPED_MATMUL
        }
        for program in found.programs
    ]
    assert [min(each) for each in rows] == [max(each) for each in rows]
    busiest, other = (min(each) for each in rows)
    assert busiest == 48  # 1.5 x 32
    assert other == pytest.approx((4 * 32 - 48) / 3, abs=1)


@pytest.mark.parametrize(
    ("hidden", "wide", "shared", "count", "top_k", "ranks"),
    [  # Jiang et al. 2024, "Mixtral of experts"; Qwen Team 2025, "Qwen3"; DeepSeek-AI 2024, "V3"
        (4096, 14336, 0, 8, 2, 8),
        (2048, 768, 0, 128, 8, 8),
        (7168, 2048, 2048, 256, 8, 64),
    ],
)
def test_work_and_memory_of_published_models_are_those_of_their_formulas(
    *, hidden: int, wide: int, shared: int, count: int, top_k: int, ranks: int
) -> None:
    experts = Experts(
        count=count, top_k=top_k, intermediate_size=wide, shared_intermediate_size=shared
    )
    strategy = strategy_of(data=ranks, expert=ranks)
    shape = Llama(
        layers=1,
        hidden_size=hidden,
        attention_heads=16,
        sequence_length=4096,
        vocab_size=64,
        experts=experts,
        execution=strategy.execution,
    )
    model = transformer(shape, micro_batch_size=1, precision=Precision.BF16)
    segments = [each for each in model.units[1].segments if each.loads is None]
    _, before, inside, after = segments
    sent = {
        value.name.rpartition("/")[2]: value.size_bytes
        for value in before.outputs
        if before.exchanges_rows(value) or value.name == before.routes
    }
    copies = 4096 * top_k
    assert sent == {"permuted": copies * hidden * 2, "weights": copies * 4, "counts": 8 * count}
    grouped = [each for each in inside.forward if each.kind is KernelKind.GROUPED_MATMUL]
    assert sum(each.flops for each in grouped) == 6 * copies * hidden * wide
    first_rows = 4 * count  # first row of each expert, in four bytes
    assert inside.saved_bytes == copies * 2 * wide * 2 + copies * wide * 2 + first_rows
    router = [each.flops for each in before.forward if each.kind is KernelKind.MATMUL][-1]
    assert router == 2 * 4096 * hidden * count
    products = [each.flops for each in after.forward if each.kind is KernelKind.MATMUL]
    assert sum(products) == 6 * 4096 * hidden * shared


@pytest.mark.parametrize(
    ("hidden", "wide", "shared", "count", "top_k", "shown"),
    [  # MB sent, Tflop of experts, MB of the first layer's input, its output, the activation
        (4096, 14336, 0, 8, 2, (67.1, 2.886, 67, 470, 235)),
        (2048, 768, 0, 128, 8, (134.2, 0.309, 134, 101, 50)),
        (7168, 2048, 2048, 256, 8, (469.8, 2.886, 470, 268, 134)),
    ],
)
def test_formulas_of_published_models_round_to_the_documented_numbers(
    *, hidden: int, wide: int, shared: int, count: int, top_k: int, shown: tuple[float, ...]
) -> None:
    copies = 4096 * top_k
    exact = (
        round(copies * hidden * 2 / 1e6, 1),
        round(6 * copies * hidden * wide / 1e12, 3),
        round(copies * hidden * 2 / 1e6),
        round(copies * 2 * wide * 2 / 1e6),
        round(copies * wide * 2 / 1e6),
    )
    assert exact == shown
    if shared:
        assert round(6 * 4096 * hidden * shared / 1e12, 3) == 0.361
        assert round(2 * 4096 * hidden * count / 1e9, 1) == 15.0


SMALL: dict[str, object] = {
    "model.experts.count": 4,
    "model.experts.top_k": 2,
    "model.experts.intermediate_size": 48,
    "parallel.expert": 2,
    "zero.stage": 1,
    "zero.emulate": "megatron",
    "zero.bucket_elements": 500_000_000,
}


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"model.experts.count": 5}, "parallel.expert: 2 must divide the 5 experts"),
        (
            {"model.experts.capacity_factor": 0.5},
            "model.experts.capacity_factor: 0.5 must be from 1, the mean, to 4, the experts",
        ),
        (
            {"model.experts.pads_to_capacity": True},
            "model.experts.pads_to_capacity: true needs capacity_factor",
        ),
        (
            {"experts.busiest": 3},
            "experts.busiest: 3 must be at most 2, the members of group expert",
        ),
        (
            {"experts.seed": 1},
            "experts.seed: 1 needs busiest, the copies of the busiest rank in multiples of the "
            "mean",
        ),
        ({"experts.busiest": 2, "parallel.expert": 1}, "experts.busiest: 2 needs parallel.expert"),
        (
            {"experts.rows": [[0, 0, 0, 0, 0, 3]]},
            "experts.rows: micro-batch 0, layer 0, group 0, source 0: counts sum to 3, must be ",
        ),
        (
            {"experts.rows": [[0, 0, 0, 0, 9, 3]]},
            "experts.rows: source 0 with expert 9 is outside the 2 members and 4 experts of routed",
        ),
        (
            {"experts.rows": [[0, 0, 0, 0, 0, 3]], "experts.busiest": 1.5},
            "experts.rows: does not go with busiest; remove one",
        ),
        ({"parallel.expert": 64}, "parallel.expert: 64 x expert_tensor 1 is more than the "),
        (
            {"zero.emulate": "fsdp1", "zero.stage": 3},
            "parallel.expert: 2 is modelled for emulate = deepspeed, fsdp2 or megatron and zsim's "
            "own stages alone",
        ),
        (
            {"zero.emulate": "fsdp2", "zero.stage": 3, "parallel.expert_tensor": 2},
            "parallel.expert_tensor: 2 must be 1 for FSDP2, which does not shard experts",
        ),
    ],
)
def test_experts_that_do_not_fit_are_one_line(changes: dict[str, object], line: str) -> None:
    with pytest.raises(MistakeError) as caught:
        zsim.check(zsim.load("tiny_llama", SMALL | changes))
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


def test_tensor_ranks_without_own_tokens_or_whole_experts_are_refused() -> None:
    shape = replace(SHAPE, execution=strategy_of(data=2, tensor=2).execution)
    with pytest.raises(ModelError, match="experts: not modelled with tensor 2 unless tokens are"):
        transformer(shape, micro_batch_size=1, tensor=2, sequence=True)


def test_more_tokens_than_the_maximum_run_out_of_memory_and_fewer_do_not() -> None:
    asked = SMALL | {"experts.maximum": 1.5}
    found = zsim.run(zsim.load("tiny_llama", asked | {"experts.busiest": 2}))
    assert not found.fits
    facts = dict(found.facts())
    assert "declared (routed)" in facts["rows received"]
    fits = zsim.run(zsim.load("tiny_llama", asked | {"experts.busiest": 1.1}))
    assert fits.fits
    more = fits.imbalance
    assert more is not None
    assert (more.busiest, more.step_time_s >= fits.step_time_s) == (1.2, True)
    assert "if the busiest rank receives 1.2 x mean" in dict(fits.facts())["imbalance"]


def test_a_file_of_counts_is_read_and_written_with_the_schedule(tmp_path: Path) -> None:
    loaded = zsim.load("tiny_llama", SMALL)
    (count,) = loaded.schedule.counts
    strategy, model = loaded.schedule.contract.strategy, loaded.document.model
    assert strategy is not None
    assert model is not None
    assert model.routing is not None
    groups = loaded.schedule.mesh.size // 2
    half = count.sent // 2
    rows = [
        (batch, layer, group, source, expert, half)
        for batch in range(strategy.train.gradient_accumulation_steps)
        for layer in range(len(model.routing.layers))
        for group in range(groups)
        for source in range(2)
        for expert in (0, 1 + source)
    ]
    path = tmp_path / "counts.csv"
    header = "micro_batch,layer,group,source,expert,rows"
    path.write_text("\n".join([header, *(",".join(map(str, row)) for row in rows)]))
    traced = zsim.load("tiny_llama", SMALL | {"experts.counts": str(path)})
    assert not zsim.check(traced).findings
    written = tmp_path / "job.json"
    traced.write_schedule(written)
    assert zsim.load(written).document.binding == CountTrace(rows=tuple(rows))
    assert zsim.run(written).step_time_s == zsim.run(traced).step_time_s
    path.write_text("rows\n1")
    with pytest.raises(MistakeError, match=f"the first line must be {header}"):
        zsim.check(zsim.load("tiny_llama", SMALL | {"experts.counts": str(path)}))


HEADER = "micro_batch,layer,group,source,expert,rows\n"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("rows\n", "the first line must be micro_batch,layer,"),
        (HEADER + "0,0,0,0,0\n", "line 2 must be 6 whole numbers"),
        (HEADER + "1" * 200_000 + ",0,0,0,0,1\n", "field larger than field limit"),
        (HEADER + "0,0,0,0,0,-4\n", "rows[0]: -4 must be at least 0"),
        (HEADER + f"0,0,0,0,0,{10**30}\n", "must be at most 2,147,483,648"),
        (HEADER + "0,0,0,0,0,5\n", "counts sum to 5, must be"),
    ],
    ids=lambda each: str(each)[:40],
)
def test_a_file_of_counts_that_cannot_be_is_refused_in_one_line(
    text: str, why: str, tmp_path: Path
) -> None:
    path = tmp_path / "counts.csv"
    path.write_text(text, "utf-8")
    with pytest.raises(zsim.MistakeError) as caught:
        zsim.run(zsim.load("tiny_llama", SMALL | {"experts.counts": str(path)}), check=False)
    assert why in str(caught.value)
    assert "\n" not in str(caught.value)
