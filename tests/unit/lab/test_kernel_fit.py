"""Constants of kernels from tables: they are found again, and what is not modelled is named."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from zsim.cluster.profile.kernels import FittedKernels, KernelProfile
from zsim.model.kernel import KernelKind
from zsim_lab.fit.kernel_fit import START, calibrated, error, predicted_s
from zsim_lab.rows.csv_rows import MeasuredError
from zsim_lab.rows.kernel_rows import CHIPS, OPERATORS, PEAKS, PRODUCTS, KernelRow, read

TRUTH = replace(
    START,
    processors=108,
    fixed_s=3e-6,
    product=0.7,
    product_fill=300,
    attention_forward=0.5,
    attention_backward=0.4,
    norm_forward=0.3,
    norm_backward=0.2,
)


def operator_row(name: str, **columns: object) -> dict[str, str]:
    row: dict[str, object] = {
        "gpu": "NVIDIAA100-SXM4-80GB",
        "operator": name,
        "mp": "1.0",
        "b": "2.0",
        "h": "16.0",
        "l": "1024.0",
        "dim": "4096.0",
        "fwd_us": "100000",
        "bwd_us": "300000",
        "source": "github:somebody/some-repository/path/file.csv@0123456",
    }
    return {key: str(value) for key, value in (row | columns).items()}


def timed(truth: KernelProfile, gpu: str = "NVIDIAA100-SXM4-80GB") -> Iterator[dict[str, str]]:
    """A table of operators on hardware that has the constants `truth`."""
    for name in ("linear1", "linear4", "flash_atten", "layernorm"):
        for length in (512, 1024, 3072):
            for hidden in (1024, 2048, 6144):
                row = operator_row(name, gpu=gpu, l=length, dim=hidden)
                found, left = read(OPERATORS, [row])
                assert not left
                times = [f"{predicted_s(each, truth) * 1e6:.6f}" for each in found]
                yield row | dict(zip(("fwd_us", "bwd_us"), times, strict=True))


def fit_of(rows: list[dict[str, str]], file: str = OPERATORS) -> FittedKernels:
    found, *scaled = calibrated(read(file, rows)[0], report=lambda _: None)
    assert not any(count for each in scaled for count in each.rows.values())
    return found


@pytest.mark.one_commit_in(6)
def test_constants_are_found_again_from_the_times_that_they_give() -> None:
    found = fit_of(list(timed(TRUTH)))
    assert (found.gpu, found.sibling) == ("a100", "assumed")  # of other kinds
    assert found.publications == ("github:somebody/some-repository@0123456",)
    assert found.rows[KernelKind.MATMUL] == 2 * 2 * 9
    assert all(value < 0.01 for value in found.errors.values()), found.errors
    assert {"fitted_matmul", "held_out_matmul", "held_out_attention"} <= set(found.errors)
    for name in ("attention_forward", "attention_backward", "norm_forward", "norm_backward"):
        assert getattr(found.constants, name) == pytest.approx(getattr(TRUTH, name), rel=0.02)


@pytest.mark.one_commit_in(9)
def test_what_has_no_rows_keeps_the_constants_of_the_sibling() -> None:
    a100 = read(OPERATORS, timed(TRUTH))[0]
    products = [
        {"accelerator": "NVIDIA GH200 SXM", "dtype": "bf16", "mamf_tflops": "800"}
        | {"best_shape_MxNxK": "4096x4096x4096", "source": "none"}
    ]
    gh200 = read(PEAKS, products)[0]
    fitted = {each.gpu: each for each in calibrated([*a100, *gh200], report=lambda _: None)}
    first, second = fitted["a100"].constants, fitted["gh200"].constants
    assert fitted["gh200"].sibling == "a100"
    assert second.processors == CHIPS["gh200"].processors
    assert second.attention_forward == first.attention_forward
    assert second.product != first.product
    assert error(gh200[0], second) < 0.01
    assert "held_out_matmul" not in fitted["gh200"].errors


@pytest.mark.one_commit_in(15)
def test_a_direction_without_rows_keeps_the_siblings_ratio_to_the_other() -> None:
    a100 = read(OPERATORS, timed(TRUTH))[0]
    faster = replace(TRUTH, attention_forward=0.25)
    rows = read(OPERATORS, timed(faster, "NVIDIAGH200120GB"))[0]
    gh200 = [row for row in rows if row.name != "flash_atten_backward"]
    fitted = {each.gpu: each for each in calibrated([*a100, *gh200], report=lambda _: None)}
    ratio = fitted["a100"].constants.attention_backward / 0.5
    backward = fitted["gh200"].constants.attention_backward
    forward = fitted["gh200"].constants.attention_forward
    assert backward / forward == pytest.approx(ratio, rel=0.01)


def one(row: dict[str, str]) -> list[KernelRow]:
    found, left = read(OPERATORS, [row])
    assert not left
    return found


def test_an_operator_becomes_the_kernels_of_its_layer() -> None:
    forward, backward = one(operator_row("linear1", mp=4))
    # 2 x 1024 tokens, 4096 to a quarter of 3 x 4096.
    assert [kernel.shape for kernel in forward.kernels] == [(1, 2048, 3072, 4096)]
    shapes = [kernel.shape for kernel in backward.kernels]
    assert shapes == [(1, 2048, 4096, 3072), (1, 3072, 4096, 2048)]
    assert (forward.seconds, backward.seconds) == pytest.approx((0.1, 0.3))
    assert one(operator_row("linear4", mp=4))[0].kernels[0].shape == (1, 2048, 4096, 4096)
    assert one(operator_row("linear_final"))[0].kernels[0].shape == (1, 2048, 50304, 4096)
    scores = one(operator_row("baddbmm", mp=4))[0].kernels[0]
    assert scores.shape == (8, 1024, 1024, 256)
    flash = one(operator_row("flash_atten", mp=4))[0].kernels[0]
    assert flash.shape == (2, 4, 4, 1024, 1024, 256)
    assert one(operator_row("gelu", mp=4))[0].kernels[0].shape == (2048, 4096)
    assert one(operator_row("layernorm", mp=""))[0].kernels[0].shape == (2048, 4096)


LEFT = {
    "another operator": (operator_row("conv"), "operator 'conv': is not modelled"),
    "the optimizer": (
        operator_row("optimizer"),
        "operator 'optimizer': several kernels that nobody lists",
    ),
    "an impossible time": (
        operator_row("linear1", fwd_us=10),
        "linear1_forward: 20616 TFLOP/s on a peak of 312",
    ),
    "a backward that is too fast": (
        operator_row("flash_atten", bwd_us=150_000),
        "flash_atten: 2.5 times the work of forward in 1.50 of its time",
    ),
    "another GPU": (operator_row("gelu", gpu="MI300X"), "gpu 'MI300X' is not known"),
    "no time": (operator_row("gelu", fwd_us=""), "fwd_us '' is not a number"),
    "half a token": (operator_row("gelu", l=0.5), "l '0.5' is not a whole number"),
}


@pytest.mark.parametrize("name", LEFT)
def test_a_row_that_is_not_modelled_is_named_with_its_reason(name: str) -> None:
    row, reason = LEFT[name]
    _, left = read(OPERATORS, [operator_row("gelu"), row])
    assert [(each.row, each.reason) for each in left] == [(3, reason)]


def test_products_of_formats_that_do_not_say_how_they_compute_are_left_out() -> None:
    row = {"gpu": "NVIDIA H100 80GB HBM3 (sm_90)", "batch": "2", "m": "256", "n": "512"}
    row |= {"k": "1024", "time_us_derived": "8.5", "source": "none"}
    found, left = read(PRODUCTS, [row | {"dtype": "BF16xBF16->BF16"}, row | {"dtype": "F32xF32"}])
    assert [(each.gpu, each.kernels[0].shape) for each in found] == [("h100", (2, 256, 512, 1024))]
    assert [each.row for each in left] == [3]


def test_a_table_without_a_column_is_refused() -> None:
    row = operator_row("gelu")
    del row["dim"]
    with pytest.raises(MeasuredError, match=rf"^{OPERATORS}: no column 'dim'$"):
        read(OPERATORS, [row])
