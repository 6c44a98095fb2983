"""zsim's executor for CUDA on recorded streams has no finding."""

import pytest
from faults.of_executor.recorded_jobs import CONFIGURATIONS, job
from recorded_executor import recorded

DRAWN = {"stage 0 bf16", "stage 1 fp16", "stage 2 replicas", "stage 3", "stage 3 offload", "fsdp2"}
"""Configurations of the suite; the others are under `long`."""


@pytest.mark.matrix(6)
@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize(
    "name",
    [
        each if each in DRAWN else pytest.param(each, marks=pytest.mark.long)
        for each in CONFIGURATIONS
    ],
)
def test_the_executor_has_no_finding(name: str) -> None:
    tape = recorded(job(name))
    assert tape.findings == []
    assert tape.refused == {}
    assert tape.operation_count > 500
