"""The caching allocator has every figure that PyTorch's own had after the same requests.

`tests/support/allocator_record.py` says how the figures were recorded.
"""

import pytest
from allocator_record import SETTINGS, Record, stored
from memory_requests import caching_allocator, replay

BY, RECORDS = stored()


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: f"{record.of}, {record.settings}")
def test_every_figure_is_that_of_pytorch(record: Record) -> None:
    allocator = caching_allocator(
        capacity_bytes=record.capacity_bytes, settings=SETTINGS[record.settings]
    )
    replay(record.asked, allocator)
    assert allocator.figures() == record.figures


def test_the_records_come_from_pytorch_and_reach_every_path() -> None:
    assert "PyTorch 2.13.0" in BY
    by_settings: dict[str, list[Record]] = {}
    for record in RECORDS:
        by_settings.setdefault(record.settings, []).append(record)
    assert by_settings.keys() == SETTINGS.keys()
    for records in by_settings.values():
        for figure in ("num_alloc_retries", "num_ooms", "num_device_free"):
            assert any(record.figures[figure] for record in records)
        # Something was freed and still waited for a stream.
        assert any(
            record.figures["active_bytes.all.peak"] > record.figures["allocated_bytes.all.peak"]
            for record in records
        )
