"""Two real ranks, measured with tiny sizes: the node is read, predicts, and stands beside a run."""

from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
import torch
from plain_net import STAGE_2, batch, net
from shared_ranks import SharedPools
from torch import distributed

import zsim
from zsim.api.placement import node_of
from zsim.api.real_comparison import compare_with_real
from zsim.backend.backend import RefusedError
from zsim.dtype import DType
from zsim.files.trace_file import read_trace
from zsim.mistake import MistakeError
from zsim.model.kernel import KernelKind
from zsim.prediction.predicted_error import step_error
from zsim.schedule.schedule import Schedule
from zsim_record.machine_measurement import MeasurementResult
from zsim_record.measure import drive_times as measured_drive
from zsim_record.measure.drive_times import DriveError, drive_times
from zsim_record.measure.kernel_times import OPERATORS, kernel_tables
from zsim_record.measure.ladder import Ladder
from zsim_record.measure.machine import measure_machine
from zsim_record.measure.stopwatch import Stopwatch
from zsim_record.measure.time_budget import TimeBudget
from zsim_torch.run_option import Option
from zsim_torch.trainer import Trainer

TINY = Ladder(
    extents=(8, 16),
    elements=(2**10, 2**12),
    attentions=((1, 2, 16, 16),),
    tensors=(64, 2**12),
    shapes=((1, 16, 8), (1, 32, 16)),
    steps=4,
    copied_bytes=2**12,
    updated=2**8,
)


class HourlyClock:
    """A clock on which an hour has passed whenever it is read: no seconds are ever left."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        self.seconds += 3600.0
        return self.seconds


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[MeasurementResult, Path]:
    """This machine in two ranks, and its file."""
    node = measure_machine(ranks=2, seconds=20.0, ladder=TINY, clock=HourlyClock())
    path = tmp_path_factory.mktemp("measured") / "node.toml"
    found = MeasurementResult(title=node.title, node=node)
    found.write(path)
    return found, path


@pytest.mark.one_commit_in(9)
def test_every_kind_of_kernel_and_collective_is_measured(
    measured: tuple[MeasurementResult, Path],
) -> None:
    times = measured[0].node.times
    kinds = {(each.kind, each.backward) for each in times.kernels}
    assert kinds == {
        (kind, backward)
        for kind in KernelKind
        if kind not in (KernelKind.MATMUL, KernelKind.GROUPED_MATMUL)  # both timed as products
        for backward in (False, True)
    }
    assert {(each.dtype, each.backward) for each in times.products} == {
        (dtype, backward) for dtype in (DType.FP32, DType.BF16) for backward in (False, True)
    }
    names = {each.collective for each in times.collectives}
    assert names == {"all_gather", "reduce_scatter", "all_reduce", "broadcast", "send_receive"}
    fitted = {each.name for each in times.operations}
    assert {"forward", "backward", "update", "load", "copy", "other"} <= fitted
    assert times.runs_on_host
    for each in times.collectives:
        # Of a message nobody but who waits for it learns the end.
        measured_sizes = 0 if each.collective == "send_receive" else len(each.curve.sizes)
        assert len(each.landing_s) == len(each.taken_s) == measured_sizes
    assert "drives" in times.missing
    assert measured[0].to_dict()["ranks"] == 2
    assert "not measured" in measured[0].text()


def test_what_was_repeated_less_often_for_want_of_seconds_is_told(
    measured: tuple[MeasurementResult, Path],
) -> None:
    # Of the runs of four steps two warm up; of three rounds of collectives one is timed alone.
    hurried = (
        "reference steps, 3 of 4 times",
        "kernels, 1 of 3 times",
        "collectives, 3 of 9 times",
    )
    assert measured[0].node.times.hurried == hurried
    assert measured[0].to_dict()["repeated_less"] == list(hurried)
    assert "seconds were short" in measured[0].text()
    job = replace(zsim.load("tiny").job, cluster=node_of(measured[1]))
    assert "seconds were short: reference steps, 3 of 4 times" in step_error(job).text


@pytest.mark.parametrize("seconds", [0, 1, 5, 500])
def test_kernels_are_timed_once_and_then_until_their_seconds_are_over(
    seconds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed = list[float]()

    def seen_s(*_: object) -> float:
        timed.append(1.0)
        return 1.0

    monkeypatch.setattr(Stopwatch, "seen_s", seen_s)
    # A clock that is read between two kernels, and has gone on by a second then.
    budget = TimeBudget.of(seconds, count().__next__)
    kernel_tables(Stopwatch(torch.device("cpu")), (DType.FP32,), budget, TINY)
    # Products of two extents have 8 shapes in 3 layouts; other kernels have two sizes, attention
    # two directions.
    cases = 8 * 3 + 2 * len(OPERATORS) + 2
    assert len(timed) == max(cases, cases + seconds - 1)
    (noted,) = budget.repeats
    assert noted == ("kernels", len(timed) // cases, 3)


@pytest.mark.one_commit_in(6)
def test_a_prediction_stands_beside_a_run_by_class_of_operation(
    measured: tuple[MeasurementResult, Path],
) -> None:
    found = compare_with_real("tiny", ranks=2, node=measured[1], steps=4)
    names = [each.name for each in found.classes]
    assert names[:2] == ["step", "no computation"]
    assert {"forward", "backward", "update", "all-gather", "reduce-scatter", "copies"} <= {*names}
    for each in found.classes:
        assert 0 < each.lowest_s <= each.median_s
        assert each.predicted_s > 0
    assert found.steps == 2
    step = found.step
    assert all(each.median_s <= step.median_s * 2 for each in found.classes[1:])


def on_rank(node: Path, folder: Path) -> tuple[Schedule, float, str]:
    """Train, write the trace of all ranks, and predict the training on the node."""
    first = batch(distributed.get_rank()).float()
    strategy = STAGE_2.but({"parallel.data": 2})
    option = Option(keep_trace=True)
    with Trainer(net().float(), strategy, batch=first, option=option) as trainer:
        for _ in range(2):
            trainer.step(first)
        trainer.write_trace(folder / "trace.json")
        trainer.write_schedule(folder / "schedule.json")
        predicted = trainer.simulate(node_of(node))
        small = replace(node_of(node), gpus_per_node=1)
        with pytest.raises(MistakeError, match=r"cluster\.nodes: 1 must be at least 2 for 2 ranks"):
            trainer.simulate(small)
        with pytest.raises(RefusedError, match=r"trace: .*absent"):
            trainer.write_trace(folder / "absent" / "trace.json")
        with pytest.raises(RefusedError, match=r"schedule: .*absent"):
            trainer.write_schedule(folder / "absent" / "schedule.json")
        schedule = trainer.schedule
    return schedule, predicted.step_time_s, predicted.backend


@pytest.fixture(scope="module")
def trained(
    pool_of: SharedPools,
    measured: tuple[MeasurementResult, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, list[tuple[Schedule, float, str]]]:
    """The trace of a training, and what its ranks returned."""
    folder = tmp_path_factory.mktemp("traces")
    pool = pool_of(2)
    return folder / "trace.json", list(pool.run(on_rank, measured[1], folder))


def test_a_trainer_writes_what_all_ranks_ran_and_it_follows_the_schedule(
    trained: tuple[Path, list[tuple[Schedule, float, str]]],
) -> None:
    path, ((schedule, *_), *_) = trained
    proof = zsim.check(schedule, against=path)
    assert proof.is_right, proof.text()
    assert {each.rank for each in read_trace(path).ranks} == {0, 1}
    planted = path.with_name("planted.json")
    text = path.read_text("utf-8")
    planted.write_text(text.replace('"reduce_scatter"', '"all_reduce"', 1), "utf-8")
    assert not zsim.check(schedule, against=planted).is_right


def test_a_trainer_writes_its_schedule_for_check_and_run(
    trained: tuple[Path, list[tuple[Schedule, float, str]]],
) -> None:
    path, ((schedule, *_), *_) = trained
    read = zsim.load(str(path.with_name("schedule.json")))
    assert read.schedule == schedule
    assert zsim.check(read, against=path).is_right


def test_a_module_of_ones_own_is_predicted_as_a_scenario_is(
    trained: tuple[Path, list[tuple[Schedule, float, str]]],
) -> None:
    (_, one_s, backend), (_, other_s, _) = trained[1]
    assert backend == "sim"
    assert one_s == other_s > 0


def test_a_trainer_of_a_schedule_has_no_kernels_to_predict() -> None:
    first, module = batch(0).float(), net().float()
    described = Trainer(module, STAGE_2, batch=first)
    described.finish()
    option = Option(given={"learning_rate": lambda _: 1e-3})
    with Trainer(net().float(), described.schedule, option=option) as trainer:
        with pytest.raises(RefusedError, match="simulate: the trainer was given a schedule"):
            trainer.simulate(zsim.load("tiny").cluster)
        with pytest.raises(RefusedError, match="keep_trace=True"):
            trainer.write_trace("trace.json")


def test_a_drive_is_measured_and_its_file_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measured_drive, "FILE_BYTES", 1 << 18)
    found = drive_times(tmp_path)
    assert min(found.read_bytes_per_s, found.write_bytes_per_s, found.latency_s) > 0
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(DriveError, match="absent must be a folder"):
        drive_times(tmp_path / "absent")
