"""Products whose operands begin at odd addresses: how slow they are, and which extents count."""

import tomllib
from collections.abc import Mapping
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

import zsim_topologies
from zsim.cluster.profile.in_training import ALONE
from zsim.cluster.profile.kernels import (
    FittedKernels,
    KernelProfile,
    KernelProfileError,
    parse,
    text,
)
from zsim.cluster.profile.row_alignment import NAMES
from zsim.compute.fitted_model import fitted_s
from zsim.dtype import DType
from zsim.model.kernel import Kernel, OperandLayout, matmul
from zsim_lab.rows.gpu_kinds import ALIGNMENT, AMPERE
from zsim_lab.rows.kernel_rows import chip_of

EXTENTS = st.integers(1, 5000)
LAYOUTS = st.sampled_from(OperandLayout)


@cache
def fitted(name: str) -> FittedKernels:
    return parse(name, tomllib.loads(zsim_topologies.kernel_profiles()[name]))


def profile(name: str = "a100") -> KernelProfile:
    return fitted(name).constants


def seconds(kernel: Kernel, by: KernelProfile | None = None, gpu: str = "a100") -> float:
    return fitted_s(kernel, chip_of(gpu).peaks, by or profile(gpu))


def product(m: int, n: int, k: int, layout: OperandLayout | None, *, batch: int = 1) -> Kernel:
    return matmul(m, n, k, DType.FP16, batch=batch, layout=layout)


@given(EXTENTS, EXTENTS, EXTENTS, LAYOUTS, st.sampled_from(sorted(ALIGNMENT)))
def test_round_products_are_exactly_as_without(
    m: int, n: int, k: int, layout: OperandLayout, name: str
) -> None:
    by = profile(name)
    kernel = product(16 * m, 16 * n, 16 * k, layout)
    assert seconds(kernel, by) == seconds(kernel, replace(by, alignment=None))
    assert seconds(kernel, by) == seconds(replace(kernel, layout=None), by)


@given(EXTENTS, EXTENTS, EXTENTS, LAYOUTS)
def test_odd_rows_never_make_a_product_faster(
    m: int, n: int, k: int, layout: OperandLayout
) -> None:
    kernel = product(m, n, k, layout)
    assert seconds(kernel) >= seconds(replace(kernel, layout=None))


@given(st.integers(0, 10_000), st.integers(0, 10_000), st.sampled_from(sorted(ALIGNMENT)))
def test_rows_that_larger_powers_of_two_divide_reach_no_less(
    inner: int, outer: int, name: str
) -> None:
    shares = ALIGNMENT[name]
    reached = shares.share(inner_bytes=inner, outer_bytes=outer)
    assert reached <= shares.share(inner_bytes=2 * inner, outer_bytes=outer)
    assert reached <= shares.share(inner_bytes=inner, outer_bytes=2 * outer)
    assert 0 < reached <= 1


@pytest.mark.parametrize(
    ("layout", "odd"),
    [
        # (m, n, k) of which one is odd: NT is contiguous along k, NN along k and n, TN along m and
        # n, and every result along n.
        (OperandLayout.NT, (2049, 2048, 2048)),
        (OperandLayout.NN, (2049, 2048, 2048)),
        (OperandLayout.TN, (2048, 2048, 2049)),
    ],
)
def test_an_extent_in_which_nothing_is_contiguous_does_not_count(
    layout: OperandLayout, odd: tuple[int, int, int]
) -> None:
    kernel = product(*odd, layout)
    assert seconds(kernel) == seconds(replace(kernel, layout=None))
    for m, n, k in ((2049, 2048, 2048), (2048, 2049, 2048), (2048, 2048, 2049)):
        if (m, n, k) != odd:
            slow = product(m, n, k, layout)
            assert seconds(slow) > 1.5 * seconds(replace(slow, layout=None))


def test_what_counts_is_bytes_and_not_elements() -> None:
    # 4,100 elements are 4 x 1,025: 8 bytes of fp16 and 16 of fp32 divide a row.
    wide, narrow = (
        matmul(64, 64, 4100, dtype, layout=OperandLayout.NT) for dtype in (DType.FP32, DType.FP16)
    )
    assert narrow.row_bytes == (8200, 128)
    assert wide.row_bytes == (16_400, 256)
    assert AMPERE.share(inner_bytes=8200, outer_bytes=128) == AMPERE.inner_8
    assert AMPERE.share(inner_bytes=16_400, outer_bytes=256) == AMPERE.inner_16


def scores(size: int) -> Kernel:
    return product(2048, 2048, size, OperandLayout.NN, batch=256)


def heads(size: int) -> Kernel:
    return product(2048, size, 2048, OperandLayout.NN, batch=256)


# Logs of Anthony et al. 2024 (github.com/jahatef/TransformerSizing at 81d67396, results), TFLOP/s
# on A100: vocab.out, 8,192 tokens by 51,200 columns, and median_h_sweep.txt, 256 heads of so many
# elements, by which no constant was chosen.
PUBLISHED = [
    (product(8192, 51_200, 14_273, OperandLayout.NT), 72.604),
    (product(8192, 51_200, 14_274, OperandLayout.NT), 138.378),
    (scores(149), 54.105),
    (heads(149), 56.241),
    (scores(150), 75.814),
    (heads(150), 96.354),
    (scores(180), 82.216),
    (heads(180), 111.922),
    (scores(152), 103.94),
    (heads(152), 140.018),
]


@pytest.mark.parametrize(("kernel", "tflops"), PUBLISHED)
def test_published_products_of_odd_extents_are_predicted(kernel: Kernel, tflops: float) -> None:
    by = replace(profile(), training=ALONE)  # they were timed alone
    assert kernel.flops / seconds(kernel, by) / 1e12 == pytest.approx(tflops, rel=0.25)


def test_an_odd_vocabulary_costs_what_nano_gpt_says() -> None:
    # karpathy/nanoGPT, 124M parameters on one A100, 12 x 1,024 tokens. 135 ms an iteration with
    # 50,257 words (README, 29 December 2022), "about 40%" of them in the last layer, which is 54
    # ms; "about 25% faster" with 50,304 (77e7e04c, 4 February 2023), which is 27 ms less, or 34.
    def head(words: int) -> float:
        tokens, width = 12 * 1024, 768
        return (
            seconds(product(tokens, words, width, OperandLayout.NT))
            + seconds(product(tokens, width, words, OperandLayout.NN))
            + seconds(product(words, width, tokens, OperandLayout.TN))
        )

    assert head(50_257) == pytest.approx(0.054, rel=0.2)
    assert 0.027 < head(50_257) - head(50_304) < 0.034


def test_a_file_keeps_what_was_published() -> None:
    for name in sorted(ALIGNMENT):
        assert profile(name).alignment == ALIGNMENT[name]


def table(values: Mapping[str, object]) -> dict[str, object]:
    shares = {**{name: getattr(AMPERE, name) for name in NAMES}, **values}
    return {name: value for name, value in shares.items() if value is not None}


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"inner_4": 1.5}, "alignment: inner_4: 1.5: allowed is 0.287 (that of fewer bytes) to 1"),
        ({"outer_8": 0.5}, "alignment: outer_8: 0.5: allowed is 0.68 (that of fewer bytes) to 1"),
        ({"inner_2": 0}, "alignment: inner_2: 0: allowed is above 0, to 1"),
        ({"inner_3": 0.5}, "alignment: inner_3: not a constant"),
        ({"outer_16": None}, "alignment: outer_16: missing"),
        ({"outer_16": "much"}, "alignment: outer_16 must be a number"),
    ],
)
def test_a_file_that_says_otherwise_is_refused(values: dict[str, object], line: str) -> None:
    read = tomllib.loads(text(fitted("a100")))
    assert parse("mine", read).constants == profile()
    with pytest.raises(KernelProfileError) as caught:
        parse("mine", {**read, "alignment": table(values)})
    assert str(caught.value) == f"mine: {line}"
