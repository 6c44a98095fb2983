"""Chunks of a stage of FSDP2's pipelines, and schedules that go with them."""

import pytest

from zsim_runtimes.fsdp2.options import FSDP2


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (
            {"pipeline_stages_per_rank": 1, "pipeline_schedule": "InterleavedZeroBubble"},
            "must be at least 2 for InterleavedZeroBubble",
        ),
        (
            {"pipeline_stages_per_rank": 3, "pipeline_schedule": "ZBVZeroBubble"},
            "must be 2 for ZBVZeroBubble",
        ),
    ],
)
def test_chunks_go_with_schedules_in_two_parts(changes: dict[str, object], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        FSDP2.model_validate(changes)
