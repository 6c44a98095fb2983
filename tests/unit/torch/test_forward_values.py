"""The first micro-batch by units has the bits of the module's own forward, or it is refused."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from odd_modules import Block, Net, batch, plain_block, sgd
from torch import Tensor

from zsim.strategy.precision import Precision
from zsim_torch.module.forward_values import ALLOWED_SPREADS, ForwardValues
from zsim_torch.module.unit import ModuleUnitError
from zsim_torch.trainer import Trainer


def forward(entered: list[object], loss: float) -> ForwardValues:
    return ForwardValues(entered, torch.tensor(loss, dtype=torch.float64))


@given(st.integers(-100, 100), st.integers(-20, 20), st.integers(-200, 200))
def test_values_may_differ_by_four_times_what_plain_runs_differ_by(
    plain: int, spread: int, apart: int
) -> None:
    module, again = forward([3, "mask"], plain), forward([3, "mask"], plain + spread)
    units = forward([3, "mask"], plain + apart)
    assert units.equals(module) == (apart == 0)
    assert units.equals(module, [again]) == (abs(apart) <= ALLOWED_SPREADS * abs(spread))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.tensor(0.0), torch.tensor(-0.0)),
        (torch.zeros(2), torch.zeros(3)),
        (torch.zeros(2), torch.zeros(2).bfloat16()),
        (torch.tensor(1.0), torch.tensor(1.0 + 2**-23)),
        (1.0, 1.5),
        (1, True),
        (None, torch.zeros(1)),
    ],
)
def test_values_that_differ_in_a_bit_are_not_equal(one: object, other: object) -> None:
    assert forward([one], 0).equals(forward([one], 0))
    assert not forward([one], 0).equals(forward([other], 0))
    assert not forward([one], 0).equals(forward([], 0))


def leaves_a_number(path: Path, write: Callable[[Tensor], str]) -> Net:
    """Return a module with blocks that write a number where zsim does not look."""

    def within(block: Block, x: Tensor) -> Tensor:
        path.write_text(write(x.detach()), "utf-8")
        return plain_block(block, x)

    def between(net: Net, x: Tensor) -> Tensor:
        return x * (1 + 0.03 * float(path.read_text("utf-8")))

    torch.manual_seed(0)
    path.write_text("0", "utf-8")
    module = Net(within)
    module.between = between
    return module


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16, Precision.FP16])
def test_what_is_refused_in_fp32_is_refused_in_narrow_formats(
    precision: Precision, tmp_path: Path
) -> None:
    module = leaves_a_number(tmp_path / "number", lambda x: str(float(x.abs().mean())))
    strategy = sgd(2).but({"train.precision": precision})
    with pytest.raises(ModuleUnitError, match="module: run by units it"):
        Trainer(module, strategy, batch=batch(0))


def count_up(path: Path, _: Tensor) -> str:
    return str(int(path.read_text("utf-8")) + 1)


def test_a_module_whose_plain_runs_differ_as_much_is_trained_with_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "number"
    module = leaves_a_number(path, partial(count_up, path))
    with pytest.warns(UserWarning, match=r"module: two forwards of one batch make losses of 0\."):
        trainer = Trainer(module, sgd(2), batch=batch(0))
    with trainer:
        assert torch.isfinite(trainer.step(batch(0)))
