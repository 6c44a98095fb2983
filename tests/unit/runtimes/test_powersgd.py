"""PowerSGD in DDP: factors as torch all-reduces them, its proof, memory, and refusals."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from drawn_examples import examples
from hypothesis import given
from hypothesis import strategies as st

import zsim
from zsim.model.architecture import GPT
from zsim.model.model import Model
from zsim.model.transformer import transformer
from zsim.proof import prove
from zsim.runtimes.registry import make_schedule
from zsim.schedule.operation import (
    Action,
    AllReduce,
    Compute,
    Copy,
    HostWait,
    Operation,
    Role,
    walk,
)
from zsim.schedule.replace import replace
from zsim.schedule.schedule import Schedule
from zsim.schedule.schedule_writer import POOL
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import Train
from zsim_runtimes.ddp.assignment import buckets_of
from zsim_runtimes.ddp.options import DDP, CommunicationHook
from zsim_runtimes.ddp.powersgd import matrices

SHAPE = GPT(layers=2, hidden_size=16, attention_heads=2, sequence_length=8, vocab_size=32)
HOOK = "torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook"


def made(
    options: DDP, *, precision: Precision = Precision.FP32, micro_batches: int = 1
) -> tuple[Model, Schedule]:
    """Return the model and the schedule of training with `options` on four ranks."""
    strategy = Strategy(
        parallel=Parallel(data=4),
        zero=Zero(stage=0, emulate=options),
        train=Train(precision=precision, gradient_accumulation_steps=micro_batches),
    )
    model = transformer(SHAPE, micro_batch_size=1, precision=precision)
    return model, make_schedule(model, strategy)


def hooked(**options: object) -> DDP:
    return DDP(comm_hook=CommunicationHook.POWER_SGD).but(options)


@st.composite
def drawn(draw: st.DrawFn) -> DDP:
    """Any options of the hook, with few or many buckets."""
    return hooked(
        bucket_cap_mb=draw(st.sampled_from([None, 0.0002, 0.001, 0.004])),
        gradient_as_bucket_view=draw(st.booleans()),
        find_unused_parameters=draw(st.booleans()),
        no_sync=draw(st.booleans()),
        matrix_approximation_rank=draw(st.sampled_from([1, 2, 3, 40])),
        min_compression_rate=draw(st.sampled_from([0.5, 2.0, 4.0])),
        use_error_feedback=draw(st.booleans()),
    )


@given(drawn(), st.sampled_from(Precision), st.integers(1, 3))
@examples(25)
def test_every_setting_is_proved_and_states_what_it_takes_for_granted(
    options: DDP, precision: Precision, micro_batches: int
) -> None:
    model, schedule = made(options, precision=precision, micro_batches=micro_batches)
    proof = prove(schedule, model)
    assert proof.findings == ()
    compresses = any(
        isinstance(each, Compute) and each.action is Action.COMPRESS
        for each in walk(schedule.programs[0].step)
    )
    said = "taken as given: factors of gradients that lose nothing, and errors that add up to zero"
    assert (said in proof.not_shown) is compresses


@dataclass
class GivenBucket:
    """A bucket as DDP gives one to a hook."""

    shapes: list[tuple[int, ...]]

    def __post_init__(self) -> None:
        self.tensors = [torch.randn(shape) for shape in self.shapes]
        self.whole = torch.cat([each.flatten() for each in self.tensors])

    def buffer(self) -> torch.Tensor:
        return self.whole

    def gradients(self) -> list[torch.Tensor]:
        sizes = [each.numel() for each in self.tensors]
        return [
            part.view(shape)
            for part, shape in zip(torch.split(self.whole, sizes), self.shapes, strict=True)
        ]

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True


class Group:
    """A process group whose all-reduces change nothing."""

    def size(self) -> int:
        return 4


class Work:
    """An all-reduce that has ended."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        self.future.set_result([tensor])

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        return self.future


class State(Protocol):
    """The state of torch's hook."""

    p_memory_dict: dict[int, torch.Tensor]
    q_memory_dict: dict[int, torch.Tensor]


def reduced_by_torch(bucket: GivenBucket, options: DDP) -> tuple[list[int], State]:
    """Return the sizes that torch's hook all-reduces, and its state."""
    hook: Any = import_module(HOOK)
    state = hook.PowerSGDState(
        Group(),
        options.matrix_approximation_rank,
        start_powerSGD_iter=2,
        min_compression_rate=options.min_compression_rate,
        use_error_feedback=options.use_error_feedback,
    )
    state.iter = 2
    sizes: list[int] = []

    def noted(tensor: torch.Tensor, *, group: Group, async_op: bool) -> Work:
        del group, async_op
        sizes.append(tensor.numel())
        return Work(tensor)

    with patch.object(dist, "all_reduce", noted):
        hook.powerSGD_hook(state, bucket).wait()
    return [each for each in sizes if each], state


@pytest.mark.parametrize("cap", [None, 0.001])
@pytest.mark.parametrize(("rank", "rate"), [(1, 2.0), (2, 0.5), (40, 1.0)])
def test_buckets_are_reduced_in_the_pieces_that_torch_reduces(
    rank: int, rate: float, cap: float | None
) -> None:
    options = hooked(bucket_cap_mb=cap, matrix_approximation_rank=rank, min_compression_rate=rate)
    model, schedule = made(options)
    wanted: list[int] = []
    for bucket in buckets_of(model, options, 4):
        shapes = [each.shape for each in bucket]
        sizes, state = reduced_by_torch(GivenBucket(shapes), options)
        wanted += sizes
        compressed = matrices(bucket, options)
        kept = [state.p_memory_dict[0].numel(), state.q_memory_dict[0].numel()]
        assert kept == [
            sum(each.rows * each.rank for each in compressed),
            sum(each.columns * each.rank for each in compressed),
        ]
    operations = walk(schedule.programs[0].step)
    assert [each.source.size for each in operations if isinstance(each, AllReduce)] == wanted


Edit = Callable[[Operation], Operation | None]


def edited(schedule: Schedule, edit: Edit) -> Schedule:
    """Return a schedule with each operation of the step replaced, or left out if it is None."""
    (program,) = schedule.programs
    step = [each for each in map(edit, program.step) if each is not None]
    kept = {each.id for each in step}
    step = [
        replace(each, after=tuple(edge for edge in each.after if edge in kept))
        if isinstance(each, Compute | Copy | AllReduce)
        else each
        for each in step
    ]
    return replace(schedule, programs=(replace(program, step=tuple(step)),))


def without(words: str) -> Edit:
    return lambda operation: None if words in operation.id else operation


def undivided(words: str) -> Edit:
    def edit(operation: Operation) -> Operation:
        if isinstance(operation, Copy) and words in operation.id:
            return replace(operation, divisor=2)
        return operation

    return edit


def swapped(action: Action) -> Edit:
    """Read the other factor in the place of the right one."""

    def edit(operation: Operation) -> Operation:
        if not isinstance(operation, Compute) or operation.action is not action:
            return operation
        factors = [each for each in operation.operands if each.role is Role.INPUT]
        others = [each for each in operation.operands if each.role is not Role.INPUT]
        return replace(operation, operands=(*factors[::-1], *others))

    return edit


WRONG: dict[str, Edit] = {
    "the rest is not reduced": without("/reduce/bucket0/rest"),
    "the rest is not divided": undivided("divide/bucket0/rest"),
    "the rest is not copied back": lambda operation: (
        replace(operation, source=operation.target)
        if isinstance(operation, Copy) and "split/bucket0" in operation.id
        else operation
    ),
    "a left factor is not reduced": without("/reduce/bucket0/left"),
    "a right factor is not reduced": without("/reduce/bucket0/right"),
    "a right factor is not divided": undivided("divide/bucket0/right"),
    "a gradient is not compressed": without("compress/block1.up.weight/right"),
    "a gradient stays as it is": without("decompress/block1.up.weight"),
    "the factors are exchanged": swapped(Action.DECOMPRESS),
    "the error of a step is added twice": lambda operation: (
        replace(operation, source=operation.target)
        if isinstance(operation, Copy) and "feed/bucket0" in operation.id
        else operation
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_an_edit_that_changes_gradients_is_found(wrong: str) -> None:
    model, schedule = made(hooked(bucket_cap_mb=1.0))
    assert any("reduce/bucket0/left" in each.id for each in schedule.programs[0].step)
    assert prove(edited(schedule, WRONG[wrong]), model).findings


def peak(model: Model, schedule: Schedule) -> int:
    del model
    return next(peak for _, pool, peak in schedule.contract.peak_bytes if pool == POOL)


def test_error_feedback_keeps_one_copy_of_all_gradients_and_makes_two_more_of_a_bucket() -> None:
    options = hooked(bucket_cap_mb=1.0)
    with_errors = peak(*made(options))
    without_errors = peak(*made(options.but(use_error_feedback=False)))
    model, _ = made(options)
    whole = 4 * sum(each.elements for each in model.parameters)
    assert whole <= with_errors - without_errors <= 3 * whole


def test_the_host_waits_for_the_device_in_each_bucket() -> None:
    options = hooked(bucket_cap_mb=0.001)
    model, schedule = made(options)
    waits = sum(isinstance(each, HostWait) for each in schedule.programs[0].step)
    assert waits == len(buckets_of(model, options, 4))


SCENARIO: dict[str, object] = {
    "title": "gradients in factors",
    "model": {
        "layers": 12,
        "hidden_size": 1024,
        "attention_heads": 16,
        "sequence_length": 512,
        "vocab_size": 32000,
    },
    "cluster": {"node": "p3_16xlarge", "nodes": 2, "fabric": "single_switch"},
    "zero": {"stage": 0, "emulate": "ddp"},
    "train": {
        "precision": "fp16",
        "micro_batch_size": 1,
        "gradient_accumulation_steps": 1,
    },
}


def test_on_a_slow_network_a_step_is_shorter_with_few_buckets() -> None:
    plain = zsim.run(SCENARIO).summary
    hook = {"zero.ddp.comm_hook": "powersgd", "zero.ddp.bucket_cap_mb": 1000.0}
    compressed = zsim.run(SCENARIO, hook).summary
    assert compressed.step_time_s < plain.step_time_s


def test_options_of_the_hook_need_it() -> None:
    with pytest.raises(ValueError, match="matrix_approximation_rank") as caught:
        made(DDP(matrix_approximation_rank=4))
    assert "needs comm_hook = powersgd" in str(caught.value)


def test_real_ranks_refuse_it_by_name() -> None:
    small = {"model.layers": 1, "model.hidden_size": 32, "model.sequence_length": 8}
    with pytest.raises(
        zsim.MistakeError, match=r"zero\.ddp\.comm_hook: gradients in factors are simulated only"
    ):
        zsim.run(
            SCENARIO,
            small | {"zero.ddp.comm_hook": "powersgd", "train.precision": "fp32"},
            backend="torch",
        )
