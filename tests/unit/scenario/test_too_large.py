"""Numbers with a slip in their exponent: what nobody could mean is told in one line."""

import pytest

from zsim.api.scenario import load
from zsim.memory import memory_ledger, peak_bytes, reserve
from zsim.memory.memory_block import ADDRESS_MASK
from zsim.mistake import MistakeError


def test_a_model_that_nobody_could_mean_is_told_by_its_parameters() -> None:
    with pytest.raises(MistakeError, match=r"^tiny: model: [\d,]+ parameters must be at most 1,0"):
        load("tiny", {"model.intermediate_size": 2**60}).job  # noqa: B018  (it is made here)


def test_sub_groups_that_cannot_be_written_down_are_told_with_a_size_that_can() -> None:
    changed = {"offload.sub_group_elements": 1}
    with pytest.raises(MistakeError, match="sub_group_elements: 1 must be at least") as caught:
        load("gpt_370m", changed).job  # noqa: B018
    least = int(str(caught.value).partition("at least ")[2].partition(":")[0])
    assert load("gpt_370m", {"offload.sub_group_elements": 1000 * least}).job.steps > 0


@pytest.mark.parametrize("allocator", ["caching", "expandable"])
def test_memory_beyond_every_allocator_is_what_its_tensors_hold(allocator: str) -> None:
    changed = {"model.sequence_length": 2**56, "cluster.allocator": allocator}
    job = load("tiny_llama", changed).job
    program = job.schedule.programs[0]
    (pool,) = (each for each in job.schedule.pools if each.name == "device")
    entries = memory_ledger(program, 2)
    found = reserve(program, entries, pool)
    assert found.shortage is not None
    assert found.needed_bytes == peak_bytes(entries, pool.name) > ADDRESS_MASK
