"""Casts of narrow GEMMs: bytes of copies and scales, and the number of passes over operands."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zsim.dtype import BlockFormat, DType
from zsim.model.kernel import matmul
from zsim.model.narrow_products import NarrowProducts, format_of
from zsim.strategy.execution import RECIPES, Float4, Float8, Quantizer, Recipe

TE, AO = Quantizer.TRANSFORMER_ENGINE, Quantizer.TORCHAO
EVERY = [(quantizer, recipe) for quantizer, found in RECIPES.items() for recipe in found]
BITS = {
    Float8.TENSORWISE: Fraction(8),
    Float8.DELAYED: Fraction(8),
    Float8.BLOCKWISE: 8 + Fraction(32, 128),
    Float8.MXFP8: 8 + Fraction(8, 32),
    Float4.NVFP4: 4 + Fraction(8, 16),
}
"""Bits of an element with its part of a scale, as the formats are defined."""

blocks = st.integers(1, 40).map(lambda count: 128 * count)


@given(recipe=st.sampled_from(list(BITS)), rows=blocks, columns=blocks, copies=st.integers(1, 2))
def test_stored_bytes_are_elements_and_scales_of_blocks(
    recipe: Recipe, rows: int, columns: int, copies: int
) -> None:
    made = NarrowProducts(recipe=recipe, quantizer=TE)
    wanted = copies * rows * columns * BITS[recipe] / 8
    assert made.stored_bytes(rows, columns, copies=copies) == wanted


@given(rows=blocks, columns=blocks)
def test_a_weight_of_deepseek_has_a_scale_for_16384_elements(rows: int, columns: int) -> None:
    made = NarrowProducts(recipe=Float8.BLOCKWISE, quantizer=TE)
    scales = rows // 128 * (columns // 128)
    assert made.stored_bytes(rows, columns, weight=True) == rows * columns + 4 * scales


def test_a_row_has_a_scale_of_four_bytes() -> None:
    made = NarrowProducts(recipe=Float8.ROWWISE, quantizer=AO)
    assert made.stored_bytes(64, 256) == 64 * 256 + 64 * 4


@pytest.mark.parametrize(("quantizer", "recipe"), EVERY)
def test_only_one_scale_and_any_layout_spare_the_second_copy(
    quantizer: Quantizer, recipe: Recipe
) -> None:
    has_one_scale = recipe in (Float8.TENSORWISE, Float8.DELAYED)
    for any_layout in (False, True):
        made = NarrowProducts(recipe=recipe, quantizer=quantizer, any_layout=any_layout)
        assert made.copies == (1 if any_layout and has_one_scale else 2)
        assert bool(made.transposed(128, 128)) is (made.copies == 2)


@given(recipe=st.sampled_from(list(BITS)), rows=blocks, columns=blocks, copies=st.integers(1, 2))
def test_a_cast_reads_16_bits_once_for_each_pass_and_writes_all_copies(
    recipe: Recipe, rows: int, columns: int, copies: int
) -> None:
    made = NarrowProducts(recipe=recipe, quantizer=TE)
    kernels = made.cast(rows, columns, copies=copies)
    passes = 2 if recipe in (Float8.TENSORWISE, Float4.NVFP4) else 1
    assert len(kernels) == passes
    written = made.stored_bytes(rows, columns, copies=copies)
    assert sum(each.bytes for each in kernels) == 2 * passes * rows * columns + written
    assert len(made.cast(rows, columns, is_measured=True)) == 1


@given(m=blocks, n=blocks, k=blocks)
def test_products_of_narrow_formats_write_16_bits(m: int, n: int, k: int) -> None:
    read, written = m * k + k * n, 2 * m * n
    assert matmul(m, n, k, DType.BF16).bytes == 2 * read + written
    assert matmul(m, n, k, DType.FP8).bytes == read + written
    assert matmul(m, n, k, BlockFormat.MXFP8).bytes == read * 33 // 32 + written
    assert matmul(m, n, k, BlockFormat.NVFP4).bytes == read * 9 // 16 + written


def test_every_recipe_has_the_format_in_which_a_gpu_multiplies() -> None:
    assert {format_of(recipe) for _, recipe in EVERY} == {DType.FP8, *BlockFormat}
