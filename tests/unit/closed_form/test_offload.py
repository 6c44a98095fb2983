"""Bytes of offloaded training by tier and by link, beside what papers and sources say of them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from offload_traffic import OffloadScheme, tier_bytes, traffic

from zsim.closed_form.offload_formulas import (
    TransformerSize,
    checkpoint_intensity,
    efficiency,
    needed_bytes_per_s,
    optimizer_intensity,
    parameter_intensity,
    parameters,
    split_gpu_bytes,
    working_state_bytes,
)

V100 = 70e12
SCHEMES = st.sampled_from(list(OffloadScheme))


@pytest.mark.parametrize(
    ("scheme", "once", "of_three"),
    [
        # Bytes a parameter: from the GPU, to it, read from NVMe, written; of 1 and 3 micro-batches
        # with gradients accumulated in 16 bits.
        ("paper", (2, 2, 0, 0), (2, 2, 0, 0)),
        ("paper_delayed", (2, 2, 0, 0), (2, 2, 0, 0)),
        ("deepspeed_1_2", (4, 2, 0, 0), (10, 6, 0, 0)),
        ("deepspeed_3", (6, 4, 0, 0), (10, 8, 0, 0)),
        ("deepspeed_3_parameters", (6, 6, 0, 0), (10, 18, 0, 0)),
        ("deepspeed_3_nvme", (6, 6, 16, 16), (10, 18, 16, 16)),
        ("deepspeed_3_all_nvme", (6, 6, 20, 18), (10, 18, 28, 18)),
        ("fsdp2", (4, 8, 0, 0), (12, 24, 0, 0)),
    ],
)
def test_links_carry_what_the_sources_of_each_runtime_move(
    scheme: str, once: tuple[int, ...], of_three: tuple[int, ...]
) -> None:
    for micro_batches, expected in ((1, once), (3, of_three)):
        found = traffic(OffloadScheme(scheme), shard=1000, micro_batches=micro_batches)
        moved = (found.from_gpu, found.to_gpu, found.nvme_read, found.nvme_written)
        assert moved == tuple(1000 * each for each in expected)


@pytest.mark.parametrize(
    ("scheme", "gpu", "pinned", "pageable", "nvme"),
    [
        ("paper", 2 * 4, 2, 12, 0),
        ("paper_delayed", 2 * 4, 6, 12, 0),
        ("deepspeed_1_2", 2 * 4, 10, 8, 0),
        ("deepspeed_3", 2, 6, 12, 0),
        ("deepspeed_3_parameters", 0, 8, 12, 0),
        ("deepspeed_3_nvme", 0, 4, 0, 16),
        ("deepspeed_3_all_nvme", 0, 2, 0, 18),
        ("fsdp2", 0, 4, 12, 0),
    ],
)
def test_tiers_hold_what_the_sources_of_each_runtime_keep(
    scheme: str, gpu: int, pinned: int, pageable: int, nvme: int
) -> None:
    found = tier_bytes(OffloadScheme(scheme), parameters=4000, ranks=4)
    held = (found.gpu, found.pinned, found.pageable, found.nvme)
    assert held == tuple(1000 * each for each in (gpu, pinned, pageable, nvme))
    assert found.host == found.pinned + found.pageable


def test_deepspeed_sums_gradients_of_stages_1_and_2_on_the_host_where_it_accumulates() -> None:
    once, often = (
        tier_bytes(OffloadScheme.DEEPSPEED_1_2, parameters=400, ranks=4, micro_batches=times)
        for times in (1, 3)
    )
    assert (once.host, often.host) == (18 * 100, 20 * 100)


@given(SCHEMES, st.integers(1, 10**9), st.integers(1, 8))
def test_traffic_is_as_large_as_the_shard(
    scheme: OffloadScheme, shard: int, micro_batches: int
) -> None:
    one = traffic(scheme, shard=1, micro_batches=micro_batches)
    all_of_it = traffic(scheme, shard=shard, micro_batches=micro_batches)
    for name in ("from_gpu", "to_gpu", "nvme_read", "nvme_written", "host_memory"):
        assert getattr(all_of_it, name) == shard * getattr(one, name)


@given(SCHEMES, st.integers(1, 8))
def test_no_scheme_moves_less_than_the_paper_s(scheme: OffloadScheme, micro_batches: int) -> None:
    # ZeRO-Offload, section 3: any cut that keeps fp32 states with the update moves 4 bytes.
    least = traffic(OffloadScheme.PAPER, shard=1)
    found = traffic(scheme, shard=1, micro_batches=micro_batches)
    assert found.from_gpu + found.to_gpu >= least.from_gpu + least.to_gpu == 4


def test_cuts_of_the_data_flow_leave_16_14_4_and_2_bytes_on_the_gpu() -> None:
    # ZeRO-Offload, table 1, whose last row prints 4 beside a reduction of 8.
    cuts = [(False, False), (True, False), (False, True), (True, True)]
    found = [
        split_gpu_bytes(gradients_on_host=gradients, update_on_host=update)
        for gradients, update in cuts
    ]
    assert found == [16, 14, 4, 2]


def test_bandwidths_that_zero_infinity_asks_for() -> None:
    # Sections 4.1 and 4.2: over 70 GB/s, nearly 1,500 GB/s, and 2 GB/s for over 50 %.
    states = parameter_intensity(sequences=1, sequence=1024)
    half = needed_bytes_per_s(intensity=states, share=0.5, peak_flops=V100)
    assert half == pytest.approx(68.36e9, rel=1e-4)
    updates = optimizer_intensity(sequences=2, sequence=1024)
    needed = needed_bytes_per_s(intensity=updates, share=0.9, peak_flops=V100)
    assert needed == pytest.approx(1230e9, rel=1e-3)
    small = checkpoint_intensity(hidden=2048)
    reached = efficiency(intensity=small, bytes_per_s=2e9, peak_flops=V100)
    assert reached == pytest.approx(0.584, abs=5e-4)


@given(st.floats(1, 1e6), st.floats(0.01, 0.99))
def test_the_needed_bandwidth_gives_the_efficiency_that_was_asked_for(
    intensity: float, share: float
) -> None:
    needed = needed_bytes_per_s(intensity=intensity, share=share, peak_flops=V100)
    found = efficiency(intensity=intensity, bytes_per_s=needed, peak_flops=V100)
    assert found == pytest.approx(share)


def test_the_published_exception_of_figure_2a_is_another_formula() -> None:
    size = TransformerSize(layers=80, hidden=10240, heads=128)
    assert parameters(size) == pytest.approx(0.1e12, rel=0.01)
    assert working_state_bytes(size) == 16 * 10240**2  # 1.56 GiB; printed are 1.95, 20 x
    assert pytest.approx(1.95, abs=0.005) == 20 * 10240**2 / 2**30
