"""What first layers keep in host memory, as Megatron-LM has it of Transformer Engine."""

from collections.abc import Iterator

import pytest
from fitting import fitting

from zsim.analysis.summary import summary
from zsim.backend.backend import Job
from zsim.config_error import ConfigError
from zsim.files.installed import topology
from zsim.memory import memory_ledger, peak_bytes
from zsim.model.architecture import GPT
from zsim.model.model import Model, ModelError
from zsim.proof import check
from zsim.runtimes.registry import host_bytes, make_schedule
from zsim.schedule.operation import Action, Allocate, Compute, Copy, Free, walk
from zsim.schedule.replace import replace
from zsim.schedule.schedule import HostBytes, Kind, Program, Schedule
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import Train
from zsim_des import SimBackend
from zsim_plan.bounds.memory_bounds import device_bytes
from zsim_runtimes.megatron.options import Megatron
from zsim_torch.capability import of_schedule

LAYERS = 6
SHAPE = GPT(layers=LAYERS, hidden_size=8, attention_heads=2, sequence_length=4, vocab_size=13)


@pytest.fixture(autouse=True)
def _stores_small_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of tests have no tensor of 262,144 elements."""
    monkeypatch.setattr(Megatron, "stored_least", 1)


def strategy_of(layers: int, **options: object) -> Strategy:
    runtime = Megatron.model_validate({"cpu_offloading_num_layers": layers, **options})
    return Strategy(
        parallel=Parallel(data=2),
        zero=Zero(stage=1, emulate=runtime),
        train=Train(precision=Precision.BF16, gradient_accumulation_steps=2, clip_norm=1.0),
    )


def written(strategy: Strategy) -> tuple[Model, Schedule, Program]:
    model = fitting(SHAPE, strategy)
    made = make_schedule(model, strategy)
    (program,) = made.programs
    return model, made, program


def kept_by_layer(model: Model) -> int:
    """Bytes that a layer keeps: what its segments save, its input and what is between them."""
    layer = model.units[1]
    saved = sum(2 * -(-each.saved_bytes // 2) for each in layer.segments)
    inputs = {name for each in layer.segments for name in each.kept_inputs}
    return saved + sum(model.values[name].size_bytes for name in inputs)


@pytest.mark.matrix(9)
@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("layers", [1, 3, LAYERS - 1])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_step_is_proved_and_copies_what_layers_keep(
    layers: int, tensor: int, *, sequence_parallel: bool
) -> None:
    strategy = strategy_of(layers, sequence_parallel=sequence_parallel)
    strategy = strategy.but({"parallel.tensor": tensor})
    model, made, _ = written(strategy)
    assert check(made, model) == ()
    once = 2 * layers * kept_by_layer(model)  # two micro-batches
    assert host_bytes(model, strategy) == (HostBytes(to_host=once, from_host=once),)


def places(program: Program, verb: str) -> Iterator[tuple[str, str]]:
    """Layers in whose part of a step others are copied."""
    for each in walk(program.step):
        if isinstance(each, Copy) and "/mb0/" in each.id and f"/{verb}/" in each.id:
            yield each.id.split("/")[3], each.id.split(f"/{verb}/")[1].split("/")[0]


def test_layers_go_out_with_the_next_and_come_back_as_many_layers_ahead_as_stay() -> None:
    """Of 6 layers 2 are stored: 0 and 1 come back as the backward of 3 and 4 begins."""
    _, _, program = written(strategy_of(2))
    out = dict.fromkeys(places(program, "offload"))
    assert [at for at, _ in out if at == "block1"] == ["block1"] * 2  # its values and segments
    assert {at for at, _ in out} == {"block1", "block2"}
    back = {at for at, _ in places(program, "fetch")}
    assert back == {"block3", "block4"}


def released(program: Program) -> dict[str, str]:
    """In which layer's part the device's memory of what a segment saved is freed, forward."""
    return {
        each.buffer: each.id.split("/")[3]
        for each in program.step
        if isinstance(each, Free) and "/forward/mb0/" in each.id and "/saved" in each.buffer
    }


def test_memory_is_free_where_so_many_layers_are_left_as_are_stored() -> None:
    _, _, program = written(strategy_of(2))
    found = released(program)
    assert {name.split("/")[0]: at for name, at in found.items()} == {
        "block0": "block4",
        "block1": "block5",
    }


@pytest.mark.parametrize("layers", [1, 2, 4])
def test_the_device_keeps_activations_of_the_other_layers(layers: int) -> None:
    """(num_layers - num_offloaded_layers) * T at the end of forward, as Transformer Engine says."""
    kept: list[int] = []
    for stored in (0, layers):
        model, _, program = written(strategy_of(stored))
        names = {each.name for each in program.buffers if each.kind is Kind.SAVED}
        alive = 0
        for each in program.step:
            if isinstance(each, Compute) and each.action is Action.BACKWARD:
                break
            if isinstance(each, Allocate | Free) and each.buffer in names:
                size = program.by_name[each.buffer]
                if size.pool == "device":
                    alive += size.size_bytes * (1 if isinstance(each, Allocate) else -1)
        kept.append(alive)
        assert peak_bytes(memory_ledger(program, 2), "device") >= device_bytes(
            model, strategy_of(stored)
        )
    assert kept[0] - kept[1] == layers * kept_by_layer(model)


def test_copies_take_time_where_pcie_is_slow() -> None:
    found = topology("dgx_a100_infiniband", None, 1)
    assert found.pcie_link is not None
    slow = replace(found, pcie_link=replace(found.pcie_link, bytes_per_s=10**6), copies=None)
    model, made, _ = written(strategy_of(4))
    job = Job(schedule=made, model=model, cluster=slow, steps=2)
    (moved,) = host_bytes(model, strategy_of(4))
    step = summary(job, SimBackend().run(job, seed=0)).step_time_s
    assert step >= (moved.to_host + moved.from_host) / 10**6


def test_waits_that_are_left_out_are_found() -> None:
    model, made, program = written(strategy_of(2))
    copies = {
        each.id for each in program.step if isinstance(each, Copy) and each.stream == "offload"
    }
    hasty = tuple(
        replace(each, after=tuple(edge for edge in each.after if edge not in copies))
        if isinstance(each, Compute)
        else each
        for each in program.step
    )
    careless = tuple(
        replace(each, uses=tuple(use for use in each.uses if use not in copies))
        if isinstance(each, Free)
        else each
        for each in program.step
    )
    early = tuple(
        replace(each, after=()) if isinstance(each, Copy) and each.id in copies else each
        for each in program.step
    )
    for step in (hasty, careless, early):
        assert step != program.step
        assert check(replace(made, programs=(replace(program, step=step),)), model)


def test_small_tensors_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    strategy = strategy_of(2)
    model, made, _ = written(strategy)
    assert check(made, model) == ()
    assert host_bytes(model, strategy) == (HostBytes(to_host=0, from_host=0),)


def test_real_ranks_refuse_it_in_one_line() -> None:
    _, made, _ = written(strategy_of(2))
    why = of_schedule(made)
    assert why is not None
    assert "simulated only" in why
    assert of_schedule(written(strategy_of(0))[1]) is None


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"activations.checkpointing": "full"}, "activations.checkpointing = full"),
        ({"activations.checkpointing": "selective"}, "activations.checkpointing = selective"),
        ({"parallel.pipeline": 2}, "pipeline = 2"),
    ],
)
def test_what_megatron_refuses_is_refused(changes: dict[str, object], why: str) -> None:
    with pytest.raises(ConfigError) as caught:
        strategy_of(2).but(changes)
    option = "zero.megatron.cpu_offloading_num_layers"
    assert str(caught.value) == f"{option}: 2 does not go with {why}"


def test_the_last_layer_stays_on_the_device() -> None:
    with pytest.raises(ModelError, match="6 must be less than the 6 layers"):
        written(strategy_of(LAYERS))
