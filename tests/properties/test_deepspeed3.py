"""DeepSpeed's stage 3 keeps its promises for every drawn model and all options."""

import pytest
from drawn import chains, models, zero_strategies
from drawn_clusters import clusters
from drawn_examples import examples
from hypothesis import assume, given
from hypothesis import strategies as st

from zsim.analysis.schedule_plan import plan
from zsim.backend.backend import Job
from zsim.cluster.cluster import Cluster
from zsim.dtype import DType
from zsim.memory import peak_bytes
from zsim.model.model import Model, Parameter, Segment, Unit, Value
from zsim.proof import check
from zsim.runtimes.registry import make_schedule
from zsim.strategy.activations import Activations
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import Train
from zsim_des import SimBackend
from zsim_runtimes.deepspeed.options import DeepSpeed


@st.composite
def options(draw: st.DrawFn, data: int) -> DeepSpeed:
    """Any limits, from nothing to everything."""
    few = st.sampled_from([0, 5, 40, 300, 10**9])
    return DeepSpeed(
        reduce_bucket_size=draw(st.sampled_from([1, 20, 100, 10**9])),
        overlap_comm=draw(st.sampled_from([None, True, False])),
        communication_data_type=draw(st.sampled_from([None, DType.FP32])),
        sub_group_size=draw(st.sampled_from([1, 20, 10**9])),
        stage3_prefetch_bucket_size=draw(few),
        stage3_max_live_parameters=draw(few),
        stage3_max_reuse_distance=draw(few),
        stage3_param_persistence_threshold=draw(few),
        zero_hpz_partition_size=draw(
            st.sampled_from([size for size in range(1, data + 1) if data % size == 0])
        ),
    )


@st.composite
def jobs(draw: st.DrawFn) -> tuple[Model, Strategy]:
    """A model, trained by DeepSpeed's stage 3."""
    drawn = draw(zero_strategies())
    strategy = Strategy(
        parallel=Parallel(data=drawn.parallel.data, tensor=drawn.parallel.tensor),
        zero=Zero(stage=3, emulate=draw(options(drawn.parallel.data))),
        activations=Activations(
            checkpointing=drawn.activations.checkpointing, partition=drawn.activations.partition
        ),
        train=Train(
            gradient_accumulation_steps=drawn.train.gradient_accumulation_steps,
            precision=drawn.train.precision,
            optimizer=drawn.train.optimizer,
            clip_norm=drawn.train.clip_norm,
        ),
    )
    model = draw(st.one_of(models(strategy), chains(strategy)))
    assume(model.parameters)
    return model, strategy


@pytest.mark.one_commit_in(9)
@given(jobs())
def test_every_schedule_passes_all_checks_and_moves_what_it_promises(
    job: tuple[Model, Strategy],
) -> None:
    model, strategy = job
    made = make_schedule(model, strategy)
    assert list(check(made, model)) == []
    assert plan(made, model).wire_bytes == made.contract.wire_bytes


@st.composite
def simulated_jobs(draw: st.DrawFn) -> tuple[Model, Strategy, Cluster]:
    """With a cluster that has enough ranks."""
    model, strategy = draw(jobs())
    return model, strategy, draw(clusters(strategy.ranks))


@examples(20)
@given(simulated_jobs())
def test_a_simulated_step_sends_what_is_promised_and_holds_no_more(
    job: tuple[Model, Strategy, Cluster],
) -> None:
    model, strategy, cluster = job
    made = make_schedule(model, strategy)
    trace = SimBackend().run(Job(schedule=made, model=model, cluster=cluster, steps=2), seed=0)
    ((_, pool, promised),) = made.contract.peak_bytes
    for rank in trace.ranks:
        sent = sum(transfer.bytes for transfer in rank.transfers if transfer.step == 1)
        assert sent == sum(line.bytes for line in made.contract.wire_bytes or ())
        assert peak_bytes(rank.book, pool) <= promised


def test_a_parameter_without_elements_adds_nothing_to_the_norm() -> None:
    """Its sub-group's gradient stays zeros, which are multiplied by no loss scale."""
    sizes = {"unit0": 2, "unit1": 0}
    units: list[Unit] = []
    before = "batch"
    for name, size in sizes.items():
        output = Value(name=f"{name}/output", elements=1, dtype=DType.FP16, requires_gradient=True)
        segment = Segment(inputs=(before,), outputs=(output,), parameters=(f"{name}/weight",))
        weight = Parameter(name=f"{name}/weight", shape=(size,))
        units.append(Unit(name=name, parameters=(weight,), segments=(segment,)))
        before = output.name
    model = Model(
        name="two units",
        units=tuple(units),
        batch=Value(name="batch", elements=4, dtype=DType.INT64, requires_gradient=False),
        micro_batch_size=1,
        tokens=1,
    )
    strategy = Strategy(
        parallel=Parallel(data=1),
        zero=Zero(stage=3, emulate=DeepSpeed(sub_group_size=1)),
        train=Train(precision=Precision.FP16),
    )
    assert list(check(make_schedule(model, strategy), model)) == []
