"""All that is wrong with a file is told at once: scenarios, studies, clusters."""

import tomllib
from functools import partial
from typing import Any

import pytest

import zsim_scenarios
from zsim.cluster.files import TopologyError
from zsim.cluster.files.explicit_fabric import EdgeTable
from zsim.cluster.files.table import read as read_part
from zsim.config_error import MOST_SHOWN
from zsim.files.installed import network_profile, topology
from zsim.scenario import trainer_files
from zsim.scenario.fault_injection import AbsentHardwareError
from zsim.scenario.resolve import resolve
from zsim.scenario.resolved_scenario import ResolvedScenario
from zsim.scenario.tables import ScenarioError, from_tables
from zsim.scenario.toml import parse
from zsim_study.study.file import StudyError
from zsim_study.study.file import from_tables as study_of

configured = partial(trainer_files.configured, key="deepspeed_config")

TINY = zsim_scenarios.text("tiny")


def tables(**changes: dict[str, object]) -> dict[str, Any]:
    found = tomllib.loads(TINY)
    for name, table in changes.items():
        found[name] = {**found.get(name, {}), **table}
    return found


def fields(error: pytest.ExceptionInfo[ValueError]) -> list[str]:
    """Return the fields that a message names, in order."""
    assert "\n" not in str(error.value)
    told = [each.split(": ")[0] for each in str(error.value).split("; also ")]
    return [name for names in told for name in names.split(", ")]


def test_values_unknown_keys_and_missing_ones_of_a_scenario() -> None:
    wrong = tables(
        zero={"stage": 9, "bucket_element": 5},
        train={"precision": "fp17", "steps": 0, "group": [{"weight_decay": 0.0}]},
        parallel={"tensr": 2},
    )
    del wrong["title"]
    with pytest.raises(ScenarioError) as error:
        from_tables(wrong)
    assert fields(error) == [
        *("parallel.tensr", "zero.bucket_element"),
        *("zero.stage", "train.precision", "train.steps"),
        *("title", "train.group.0.parameters"),
    ]


def test_keys_of_a_study() -> None:
    wrong = {"base": {}, "hold": "batch", "axes": [], "goal": {"fits": 1}}
    with pytest.raises(StudyError) as error:
        study_of(wrong)
    assert fields(error) == ["axes", "hold", "goal.fits", "question", "axis"]


def test_keys_of_a_part_of_a_cluster() -> None:
    with pytest.raises(TopologyError) as error:
        read_part(EdgeTable, "links", {"source": "", "taget": "x", "latency": 3})
    assert str(error.value).startswith("links: taget: unknown key; did you mean target?")
    assert fields(error)[1:] == ["source", "latency", "target", "bandwidth_per_direction"]


def test_of_very_many_mistakes_the_first_and_a_count() -> None:
    wrong = tables(zero={f"knob{number}": 1 for number in range(MOST_SHOWN + 3)})
    with pytest.raises(ScenarioError) as error:
        from_tables(wrong)
    assert len(fields(error)) == MOST_SHOWN
    assert str(error.value).endswith("; and 3 more")


def settled(*settings: str) -> ResolvedScenario:
    return resolve(parse(TINY, settings), topology, network_profile)


def test_contradictions_of_tables_and_what_does_not_exist() -> None:
    with pytest.raises(ScenarioError) as error:
        settled(
            "cluster.topology=nowhere",
            "network.profile=none_such",
            "compute.host_per_segment=1 ms",
            "train.beta1=0.5",
            "train.momentum=0.5",
            "train.optimizer=sgd",
        )
    assert fields(error) == [
        "cluster.topology",
        "compute.host_per_segment",
        "network.profile",
        "train.beta1",
    ]


def test_contradictions_inside_a_strategy() -> None:
    with pytest.raises(ScenarioError) as error:
        settled("zero.secondary=3", "zero.fused_buffers=model", "offload.checkpoints=host")
    assert fields(error) == [
        "zero.secondary",
        "zero.fused_buffers",
        "zero.bucket_elements",
        "offload.checkpoints",
    ]


GPU, NIC = '{kind = "gpu", rank = 99, factor = 2}', '{kind = "nic", node = 0, nic = 9, dead = true}'


def test_faults_and_neighbours_that_name_what_is_not_there() -> None:
    neighbour = 'neighbour=[{nodes = [0, 7], bandwidth_per_direction = "1 GB/s"}]'
    with pytest.raises(AbsentHardwareError) as error:
        settled(f"fault=[{GPU}, {NIC}]", neighbour)
    assert fields(error) == ["fault.0.rank", "fault.1.nic", "neighbour.0.nodes"]


def test_faults_are_told_beside_hardware_that_is_missing() -> None:
    with pytest.raises(AbsentHardwareError) as error:  # a slip, for a study as well
        settled(f"fault=[{GPU}]", "cluster.topology=dgx2_infiniband", "train.precision=bf16")
    assert fields(error) == ["train.precision", "fault.0.rank"]


def test_options_of_a_deepspeed_configuration() -> None:
    text = '{"optimizer": {"params": {"betas": [2, 3], "eps": -1}}, "gradient_clipping": -1}'
    with pytest.raises(ScenarioError) as error:
        configured(parse(TINY), text)
    told = str(error.value)
    assert [each.split(": ")[1] for each in told.split("; also ")] == [
        "optimizer.params.betas",
        "optimizer.params.betas",
        "optimizer.params.eps",
        "gradient_clipping",
    ]
