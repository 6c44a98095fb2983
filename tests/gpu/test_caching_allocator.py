"""The caching allocator against torch.cuda's, on the recorded lists and on this device."""

import pytest
import torch
from allocator_record import SETTINGS, Record, by_device, can_be_served_on_a_device, lists
from memory_requests import caching_allocator, replay

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

RECORDS = [record for record in lists() if can_be_served_on_a_device(record)]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: f"{record.of}, {record.settings}")
def test_every_figure_is_that_of_the_device(record: Record) -> None:
    found = by_device(record)
    allocator = caching_allocator(
        capacity_bytes=record.capacity_bytes, settings=SETTINGS[record.settings]
    )
    replay(record.asked, allocator)
    figures = allocator.figures()
    assert figures == {name: found.figures[name] for name in figures}
