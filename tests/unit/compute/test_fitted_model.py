"""Times of kernels by fitted constants: which shapes are slow, and that no peak is exceeded."""

import tomllib
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zsim.cluster.cluster import Gpu, Rate
from zsim.cluster.profile.fused_attention import FusedAttention
from zsim.cluster.profile.host_launch import EAGER
from zsim.cluster.profile.kernels import (
    NAMES,
    FittedKernels,
    KernelProfile,
    KernelProfileError,
    parse,
    text,
)
from zsim.compute.fitted_model import Peaks, fitted_s, waves
from zsim.compute.roofline import kernel_ps
from zsim.dtype import DType
from zsim.model.kernel import (
    CUDNN,
    Kernel,
    KernelKind,
    OperandLayout,
    flash_attention,
    grouped_matmul,
    matmul,
    streaming,
)
from zsim.model.token_loads import loads_of
from zsim_lab.rows.gpu_kinds import CUDNN_HOPPER, FLASH2_HOPPER

PEAKS = Peaks(flops=1e15, bytes=1e13)
# Whole shares, so that times can be read off: of 10 processors each does 1e14 operations a second.
SHARES: dict[str, Any] = {**dict.fromkeys(NAMES, 1.0), "processors": 10.0, "fixed_s": 1e-12}
IDEAL = KernelProfile(launch=EAGER, **SHARES)
EXTENTS = st.integers(1, 5000)


def seconds(kernel: Kernel, by: KernelProfile = IDEAL, peaks: Peaks = PEAKS) -> float:
    return fitted_s(kernel, peaks, by)


def product(m: int, n: int, k: int, batch: int = 1) -> Kernel:
    return matmul(m, n, k, DType.FP16, batch=batch)


@given(EXTENTS, EXTENTS, EXTENTS, st.integers(1, 8))
def test_no_product_is_faster_than_the_peaks(m: int, n: int, k: int, batch: int) -> None:
    kernel = product(m, n, k, batch)
    assert seconds(kernel) >= kernel.flops / PEAKS.flops
    assert seconds(kernel) >= kernel.bytes / PEAKS.bytes


@given(EXTENTS, EXTENTS, EXTENTS, st.sampled_from([0, 1, 2]))
def test_more_work_never_takes_less_time(m: int, n: int, k: int, which: int) -> None:
    extents = [m, n, k]
    extents[which] *= 2
    assert seconds(product(*extents)) >= seconds(product(m, n, k)) * (1 - 1e-12)


def test_a_half_empty_wave_takes_as_long_as_a_full_one() -> None:
    alone = replace(IDEAL, tile_128x64=0.01, tile_64x64=0.01, tile_128x128=0.01)
    # Tiles of 256 x 128 on 10 processors: 10 tiles are one wave, 11 are two; the inner extent is
    # too long for its sums to be worth cutting.
    one, two = (product(256 * tiles, 128, 2**12) for tiles in (10, 11))
    assert seconds(two, alone) == pytest.approx(2 * seconds(one, alone), rel=0.01)
    assert waves(59, 10) == 6
    assert waves(61, 10) == 6.1  # from six on they even out


def test_a_short_inner_extent_does_not_fill_the_pipeline() -> None:
    slow = replace(IDEAL, product_fill=256.0)
    rich = Peaks(flops=1e15, bytes=1e18)  # where memory does not count
    short, long = product(2560, 1280, 256), product(2560, 1280, 25_600)
    assert seconds(short, slow, rich) == pytest.approx(2 * seconds(short, peaks=rich), rel=0.01)
    assert seconds(long, slow, rich) == pytest.approx(1.01 * seconds(long, peaks=rich), rel=0.001)


def test_the_fastest_tile_counts_and_few_of_them_are_cut_along_the_inner_extent() -> None:
    rich = Peaks(flops=1e15, bytes=1e18)
    # One tile of 64 x 64 would be one of 10 processors; eight parts of it are on eight.
    small = product(64, 64, 2**14)
    assert seconds(small, peaks=rich) == pytest.approx(small.flops / 8 / 1e14, rel=1e-3)
    bad = replace(IDEAL, tile_64x64=0.1)
    assert seconds(small, bad, rich) > seconds(small, peaks=rich)


def test_attention_pads_heads_and_spreads_rows_of_queries() -> None:
    def attention(size: int, heads: int, length: int = 1280, *, backward: bool = False) -> Kernel:
        shape = (1, heads, heads, length, length, size)
        return flash_attention(shape, DType.FP16, backward=backward)

    full = attention(64, 1)  # ten rows of 128 queries on ten processors
    assert seconds(full) == pytest.approx(full.executed_flops / 1e15, rel=1e-3)
    assert seconds(attention(33, 1)) == pytest.approx(seconds(full), rel=1e-3)
    assert seconds(attention(64, 1, 1290)) > 1.8 * seconds(full)
    half = replace(IDEAL, attention_backward=0.5)
    ratio = seconds(attention(64, 1, backward=True), half) / seconds(full, half)
    assert ratio == pytest.approx(2.5 / 0.5, rel=1e-3)


def test_flash_attention_2_reaches_what_was_published_of_it_and_less_in_short_sequences() -> None:
    h100 = replace(IDEAL, flash2=FLASH2_HOPPER, processors=132.0)
    peaks = Peaks(flops=989.4e12, bytes=1e13)
    # Shah et al. 2024, figure 5, heads of 128 with mask, 16,384 tokens in all: TFLOP/s of an H100.
    for length, reached in ((512, 191), (1024, 260), (2048, 298), (8192, 333), (16_384, 335)):
        shape = (16_384 // length, 16, 16, length, length, 128)
        kernel = flash_attention(shape, DType.FP16, version=2)
        rate = kernel.executed_flops / seconds(kernel, h100, peaks) / 1e12
        assert rate == pytest.approx(reached, rel=0.05)
        slower = replace(kernel, backward=True)
        assert seconds(slower, h100, peaks) > seconds(kernel, h100, peaks)
        assert seconds(kernel) == seconds(replace(kernel, version=1))  # where it is not known


def test_cudnn_reaches_what_was_published_of_it_or_else_what_flash_attention_2_does() -> None:
    h100 = replace(IDEAL, flash2=FLASH2_HOPPER, cudnn=CUDNN_HOPPER, processors=132.0)
    peaks = Peaks(flops=989.4e12, bytes=1e13)
    # Shah et al. 2024, figure 5, as above; figure 6 has 516 TFLOP/s backward without mask.
    for length, reached in ((512, 315), (1024, 410), (2048, 484), (8192, 529), (16_384, 539)):
        shape = (16_384 // length, 16, 16, length, length, 128)
        kernel = flash_attention(shape, DType.FP16, version=CUDNN)
        rate = kernel.executed_flops / seconds(kernel, h100, peaks) / 1e12
        assert rate == pytest.approx(reached, rel=0.06)
        back = replace(kernel, backward=True)
        assert back.executed_flops / seconds(back, h100, peaks) / 1e12 < 516
        unknown = replace(h100, cudnn=None)
        assert seconds(kernel, unknown, peaks) == seconds(replace(kernel, version=2), h100, peaks)


@pytest.mark.parametrize("kind", [kind for kind in KernelKind if not kind.multiplies_matrices])
@pytest.mark.parametrize("backward", [False, True])
def test_all_else_moves_memory_at_a_share_of_its_own(kind: KernelKind, backward: bool) -> None:
    name = f"{kind}_{'backward' if backward else 'forward'}"
    kernel = streaming(kind, (1000, 1000), DType.FP32, streams=2, backward=backward)
    halved: dict[str, Any] = {name: 0.5}
    half = replace(IDEAL, launch=EAGER, fixed_s=1e-6, **halved)
    assert seconds(kernel, half) == pytest.approx(1e-6 + 2 * 8e6 / 1e13)
    assert seconds(kernel) == pytest.approx(8e6 / 1e13, rel=1e-3)


def test_a_product_of_no_known_shape_is_limited_by_the_shares() -> None:
    kernel = Kernel(kind=KernelKind.MATMUL, flops=10**12, bytes=10, dtype=DType.FP16)
    assert seconds(kernel, replace(IDEAL, product=0.5)) == pytest.approx(2e-3)


def test_a_gpu_with_constants_takes_their_times_and_one_without_its_rates() -> None:
    rate = Rate(dtype=DType.FP16, peak=10**15, matmul=10**14, elementwise=10**14)
    plain = Gpu(name="x", memory_bytes=1, memory_bytes_per_s=10**13, rates=(rate,))
    fitted = replace(plain, kernels=IDEAL)
    kernel = product(2560, 1280, 2**13)
    assert kernel_ps(kernel, plain) == kernel.flops // 100
    assert kernel_ps(kernel, fitted) == pytest.approx(seconds(kernel) * 1e12, abs=1)


def test_a_product_off_the_multiple_runs_without_matrix_units() -> None:
    rate = Rate(dtype=DType.FP16, peak=10**15, matmul=10**14, elementwise=10**14, multiple=8)
    fitted = Gpu(name="x", memory_bytes=1, memory_bytes_per_s=10**13, rates=(rate,), kernels=IDEAL)
    on, off = product(2560, 1280, 2**13), product(2560, 1280, 2**13 - 4)
    assert kernel_ps(off, fitted) == pytest.approx(10 * kernel_ps(on, fitted), rel=1e-3)


FLASH2 = FusedAttention(forward=0.25, backward=0.5, forward_fill=100.0, backward_fill=200.0)
FITTED = FittedKernels(
    gpu="x100",
    constants=replace(
        IDEAL, fixed_s=5.5e-06, flash2=FLASH2, cudnn=FLASH2, gpu="x100", vintage="PyTorch 9, 2030"
    ),
    rows={"matmul": 3},
    errors={"fitted_matmul": 0.0125},
    publications=("github:a/b@c",),
    sibling="y100",
)


def test_a_file_says_what_was_fitted() -> None:
    assert parse("x", tomllib.loads(text(FITTED))) == FITTED


WRONG = {
    'gpu = "x100"': ("", "x: gpu: missing"),
    "[rows]": ("more = 1\n[rows]", "x: more: not a key of fitted kernels"),
    "product = 1": ("product = true", "x: constants: product must be a number"),
    "product_fill = 1": ("", "x: constants: product_fill: missing"),
    "tile_64x64 = 1": ("tile_64x64 = 0", "x: constants: tile_64x64: 0.0 must be more than 0"),
    "collective_s": (
        "call_s",
        "x: launch: call_s: must be one of forward_s, backward_s, "
        "operation_s, collective_s, wait_s",
    ),
    "forward_fill = 100": ("forward_fill = 0", "x: flash2: forward_fill: 0.0 must be more than 0"),
    "backward_fill = 200": ("", "x: flash2: backward_fill: missing"),
    "[flash2]": ("[flash2]\nfill = 1", "x: flash2: fill: not a constant"),
    "wait_s = 1e-06": ("wait_s = -1", "x: launch: wait_ps: -1000000000000 must be at least 0"),
    "processors = 10": ("processors = 10\nx = 1", "x: constants: x: not a constant"),
}


@pytest.mark.parametrize("old", WRONG)
def test_a_file_with_a_fault_is_refused_in_one_line(old: str) -> None:
    new, line = WRONG[old]
    changed = text(FITTED).replace(old, new, 1)
    with pytest.raises(KernelProfileError) as caught:
        parse("x", tomllib.loads(changed))
    assert str(caught.value) == line


def of_experts(
    counts: list[int], n: int, k: int, layout: OperandLayout = OperandLayout.NT
) -> Kernel:
    return grouped_matmul(loads_of(counts), n, k, DType.FP16, layout=layout)


COUNTS = st.lists(st.integers(0, 3000), min_size=1, max_size=20).filter(any)


@given(COUNTS, EXTENTS, EXTENTS, st.sampled_from(OperandLayout))
def test_no_grouped_product_is_faster_than_the_peaks(
    counts: list[int], n: int, k: int, layout: OperandLayout
) -> None:
    kernel = of_experts(counts, n, k, layout)
    assert seconds(kernel) >= kernel.flops / PEAKS.flops
    assert seconds(kernel) >= kernel.bytes / PEAKS.bytes


@given(st.integers(1, 3000), EXTENTS, EXTENTS)
def test_one_expert_is_a_product_that_is_not_cut(m: int, n: int, k: int) -> None:
    """Cutting the inner extent makes a small product faster, never slower."""
    assert seconds(of_experts([m], n, k)) >= seconds(product(m, n, k)) * (1 - 1e-9)
    by_rows = of_experts([m], n, k, OperandLayout.TN)
    assert seconds(by_rows) >= seconds(product(n, k, m)) * (1 - 1e-9)


@given(st.integers(1, 60), st.integers(1, 8), st.sampled_from([0, 1]))
def test_experts_with_whole_tiles_take_as_long_as_one_product(
    tiles: int, experts: int, more: int
) -> None:
    rows, one = 256 * tiles, IDEAL
    many = of_experts([rows] * experts + [0] * more, 128 * 5, 512)
    peaks = Peaks(flops=1e15, bytes=1e30)  # more matrices are read
    whole = seconds(product(rows * experts, 128 * 5, 512), one, peaks)
    assert seconds(many, one, peaks) == pytest.approx(whole)


def test_few_tokens_of_each_expert_waste_most_of_a_tile() -> None:
    """64 rows is the smallest tile: with 8 rows for each expert, an eighth of it does work."""
    peaks = Peaks(flops=1e15, bytes=1e30)
    few, whole = (seconds(of_experts([each] * 128, 4096, 4096), peaks=peaks) for each in (8, 64))
    assert few == pytest.approx(whole)
    assert few / (8 * 128) > 7.9 * whole / (64 * 128)


def test_one_expert_with_all_tokens_is_faster_than_the_same_tokens_spread_thinly() -> None:
    spread = seconds(of_experts([16] * 64, 2048, 2048))
    assert spread > 3 * seconds(of_experts([1024] + [0] * 63, 2048, 2048))
