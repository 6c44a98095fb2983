"""What a trainer costs beside its kernels: its Python, copies in many pieces, ranks that wait."""

from typing import Any

import pytest

from zsim.api.forecast import forecast, last_step_s
from zsim.api.run_forecast import RunForecast
from zsim.backend.backend import Job
from zsim.cluster.profile.host_launch import EAGER
from zsim.files.installed import network_profiles
from zsim.files.source import resolved
from zsim.mistake import MistakeError
from zsim.scenario.tables import from_tables
from zsim.schedule.operation import (
    Action,
    Compute,
    Copy,
    OperationError,
    View,
)
from zsim.schedule.replace import replace
from zsim_lab.fit.constants import IN_TRAINING

TABLES: dict[str, Any] = {
    "title": "two nodes share every matrix",
    "model": {
        "architecture": "llama",
        "layers": 2,
        "hidden_size": 1024,
        "attention_heads": 16,
        "sequence_length": 512,
        "vocab_size": 4096,
    },
    "cluster": {"topology": "dgx_h100_infiniband"},
    "parallel": {"data": 1, "tensor": 16},
    "zero": {"emulate": "nanotron", "stage": 0},
    "train": {"micro_batch_size": 1, "gradient_accumulation_steps": 1, "precision": "bf16"},
    "compute": {"profile": "h100", "host_per_segment": "0 ms"},
    "network": {"profile": "h100"},
}


def changed(**tables: dict[str, Any]) -> dict[str, Any]:
    return TABLES | {name: TABLES[name] | table for name, table in tables.items()}


def step_time_s(tables: dict[str, Any]) -> float:
    found = forecast(tables)
    assert isinstance(found, RunForecast), found
    return found.step_time_s


def test_a_segment_costs_the_host_what_the_trainer_does_for_it() -> None:
    busy = replace(EAGER, segment_ps=1_000)
    segment = Compute(id="a", stream="compute", action=Action.FORWARD, unit="block0", operands=())
    update = replace(segment, action=Action.UPDATE, unit="")
    assert busy.issue_ps(segment) - EAGER.issue_ps(segment) == 1_000
    assert busy.issue_ps(update) == EAGER.issue_ps(update)


def test_a_copy_of_many_pieces_is_as_many_launches() -> None:
    view = View(buffer="x", size=1)
    copy = Copy(id="a", stream="compute", source=view, target=view)
    assert EAGER.issue_ps(replace(copy, launches=5)) == 5 * EAGER.issue_ps(copy)
    with pytest.raises(OperationError, match="launches -1 must be at least 0"):
        replace(copy, launches=-1)


def test_collectives_of_the_tensor_axis_wait_where_they_span_nodes() -> None:
    # 2 blocks of 2 all-reduces each way, those of the embedding, of the head's statistics and of
    # the gradient that the head sums: 11 in a micro-batch; each waits 2 x 16 x 1 ms.
    source = resolved("scenario", from_tables(TABLES))
    job = source.job()
    constants = job.cluster.network
    assert constants is not None

    def waiting_s(job: Job) -> float:
        waits = replace(job.cluster, network=constants.changed(tensor_wait_s=1e-3))
        return last_step_s(replace(job, cluster=waits), source.simulation())

    assert waiting_s(job) - step_time_s(TABLES) == pytest.approx(11 * 2 * 16 * 1e-3, rel=0.01)
    near = changed(parallel={"data": 1, "tensor": 8})
    assert waiting_s(resolved("scenario", from_tables(near)).job()) == step_time_s(near)


def test_only_a_cluster_whose_training_showed_it_has_a_wait_of_tensor_ranks() -> None:
    waits = {
        profile.name: profile.numbers["tensor_wait_s"]
        for profiles in network_profiles().values()
        for profile in (profiles.shared, *profiles.systems.values())
        if "tensor_wait_s" in profile.numbers
    }
    assert waits == {
        f"{gpu}/{system}": numbers["tensor_wait_s"]
        for (gpu, system), numbers in IN_TRAINING.items()
    }


@pytest.mark.parametrize("name", ["host_per_segment", "host_per_unit", "host_per_collective"])
def test_they_add_to_a_profile(name: str) -> None:
    with pytest.raises(MistakeError, match=f"compute.{name}: needs a profile"):
        resolved("scenario", from_tables(TABLES | {"compute": {name: "1 ms"}}))


def test_a_collective_costs_the_host_what_the_scenario_says() -> None:
    near = {"parallel": {"data": 1, "tensor": 8}}
    more_s, most_s = (
        step_time_s(changed(compute={"host_per_collective": each}, **near))
        for each in ("50 ms", "51 ms")
    )
    # The host is all that counts: 11 collectives of a micro-batch, as above.
    assert most_s - more_s == pytest.approx(11e-3, rel=0.01)


def test_a_unit_costs_the_host_once_however_many_segments_it_has() -> None:
    busy = replace(EAGER, unit_ps=1_000)
    first = Compute(id="a", stream="compute", action=Action.FORWARD, unit="block0", operands=())
    second = replace(first, segment=1)
    assert busy.issue_ps(first) - EAGER.issue_ps(first) == 1_000
    assert busy.issue_ps(second) == EAGER.issue_ps(second)


def test_costs_follow_from_the_trainer_unless_the_scenario_says_them() -> None:
    near = {"parallel": {"data": 1, "tensor": 8}}
    by_trainer = TABLES | {"compute": {"profile": "h100"}} | near
    assert step_time_s(by_trainer) == step_time_s(
        changed(compute={"host_per_segment": "0.28 ms"}, **near)
    )
    assert step_time_s(changed(**near)) < step_time_s(by_trainer)
