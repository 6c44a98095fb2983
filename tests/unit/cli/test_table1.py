"""All 54 cells of Table 1 of the ZeRO paper, to the printed digits.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020
(arXiv 1910.02054v3), Table 1: memory of the model states on a device, in GB (1e9 bytes), with
mixed-precision Adam. What the plan says is summed over the buffers of the schedule; the paper's
formula is the second opinion.
"""

import json
from decimal import ROUND_DOWN, ROUND_HALF_UP, Decimal

import pytest

from zsim.cli.main import answer

RANKS = (1, 4, 16, 64, 256, 1024)
PRINTED = {
    (1, "7.5e9"): ("120", "52.5", "35.6", "31.4", "30.4", "30.1"),
    (1, "128e9"): ("2048", "896", "608", "536", "518", "513"),
    (1, "1e12"): ("16000", "7000", "4750", "4187", "4046", "4011"),
    (2, "7.5e9"): ("120", "41.3", "21.6", "16.6", "15.4", "15.1"),
    (2, "128e9"): ("2048", "704", "368", "284", "263", "257"),
    (2, "1e12"): ("16000", "5500", "2875", "2218", "2054", "2013"),
    (3, "7.5e9"): ("120", "30", "7.5", "1.88", "0.47", "0.12"),
    (3, "128e9"): ("2048", "512", "128", "32", "8", "2"),
    (3, "1e12"): ("16000", "4000", "1000", "250", "62.5", "15.6"),
}
CELLS = [
    (stage, parameters, ranks, text)
    for (stage, parameters), row in PRINTED.items()
    for ranks, text in zip(RANKS, row, strict=True)
]


def as_printed(size_bytes: int, printed: str) -> Decimal:
    """GB with as many digits as `printed`: rounded, but cut off above 200 GB, as in the paper."""
    size = Decimal(size_bytes) / 10**9
    rounding = ROUND_DOWN if size > 200 else ROUND_HALF_UP
    return size.quantize(Decimal(printed), rounding=rounding)


def formula(stage: int, parameters: int, ranks: int) -> int:
    """Section 5: 2 bytes of parameter, 2 of gradient, K = 12 of optimizer state, some cut."""
    two, gradient, state = (2 * parameters, 2 * parameters, 12 * parameters)
    state //= ranks
    gradient //= ranks if stage >= 2 else 1
    two //= ranks if stage >= 3 else 1
    return two + gradient + state


def test_there_are_54_cells() -> None:
    assert len(CELLS) == 54


@pytest.mark.matrix(9)
@pytest.mark.parametrize(("stage", "parameters", "ranks", "printed"), CELLS)
def test_a_cell_has_the_printed_digits(
    stage: int, parameters: str, ranks: int, printed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = [f"model.parameters={parameters}", f"zero.stage={stage}", f"parallel.data={ranks}"]
    options = [word for setting in settings for word in ("--set", setting)]
    assert answer(["plan", "zero_table1", *options, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ranks"] == ranks
    assert found["parameters"] == int(float(parameters))
    size = found["model_state_bytes"]
    assert as_printed(size, printed) == Decimal(printed)
    # Each of 32 units is padded to a multiple of the ranks: at most 16 bytes x 32 x 1023 more.
    expected = formula(stage, int(float(parameters)), ranks)
    assert 0 <= size - expected <= 16 * 32 * (ranks - 1) + 3
