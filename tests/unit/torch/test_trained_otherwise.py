"""Modules and optimizers that a schedule would train otherwise than torch: refused in one line."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, cast

import pytest
import torch
from odd_modules import RATE, WIDTH, Block, Mean, Net, batch, halved, plain_block, row, sgd, with_
from torch import Tensor, nn

from zsim.backend.backend import RefusedError
from zsim_torch.module.unit import ModuleUnitError
from zsim_torch.run_option import Option
from zsim_torch.trainer import Trainer


def clamps(block: Block, x: Tensor) -> Tensor:
    with torch.no_grad():
        block.inner.weight.clamp_(-0.1, 0.1)
    return plain_block(block, x)


def clamps_data(block: Block, x: Tensor) -> Tensor:
    block.inner.weight.data.clamp_(-0.1, 0.1)
    return plain_block(block, x)


def doubles_input(block: Block, x: Tensor) -> Tensor:
    return plain_block(block, x.mul_(2))


def hooks_input(block: Block, x: Tensor) -> Tensor:
    x.register_hook(halved)  # type: ignore[no-untyped-call]
    return plain_block(block, x)


def hooks_output(net: Net, x: Tensor) -> Tensor:
    x.register_hook(halved)  # type: ignore[no-untyped-call]
    return x


def complex_scale(block: Block, x: Tensor) -> Tensor:
    return plain_block(block, (x * block.scale).abs())


def freezes(net: Net, x: Tensor) -> Tensor:
    net.first.weight.requires_grad = False
    return x


def keeps_mean(net: Net, x: Tensor) -> Tensor:
    net.blocks[0].mean = x.mean(0)
    return x


def appends(block: Block, given: Any) -> Tensor:  # noqa: ANN401  (a list of tensors)
    given.append(plain_block(block, given[-1]))
    made: Tensor = given[-1]
    return made


class Appending(Net):
    """Its blocks are given a list, and change it."""

    def __init__(self) -> None:
        super().__init__(appends)

    def forward(self, x: Tensor) -> Tensor:
        found = [self.first(x)]
        for block in self.blocks:
            block(found)
        return torch.stack(found).mean()


def reads_file(log: Path, net: Net, x: Tensor) -> Tensor:
    """Read a file that blocks write: it shows in values alone."""
    return x * (1 + 1e-5 * float(log.read_text("utf-8") or 0))


def writes_file(net: Any) -> None:  # noqa: ANN401  (any module)
    net.log = NamedTemporaryFile("w", encoding="utf-8")  # noqa: SIM115  (it lives with the module)
    net.between = partial(reads_file, Path(net.log.name))
    for block in net.blocks:
        block.within = partial(writes, net.log.name)


def writes(log: str, block: Block, x: Tensor) -> Tensor:
    Path(log).write_text(str(float(x.detach().sum())), "utf-8")
    return plain_block(block, x)


class Overwriting(Net):
    """It changes its batch."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(0.5))


MAKE: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "a hook of a parameter": (
        lambda: with_(Net(), lambda net: net.first.weight.register_hook(halved)),
        r"parameter first\.weight: it has a hook for its gradient",
    ),
    "a hook after a gradient was added": (
        lambda: with_(
            Net(),
            lambda net: net.first.weight.register_post_accumulate_grad_hook(lambda each: None),
        ),
        r"parameter first\.weight: it has a hook for its gradient",
    ),
    "a backward hook of the whole": (
        lambda: with_(
            Net(), lambda net: net.register_full_backward_pre_hook(lambda _, given: given)
        ),
        "module: it has a backward hook, which is called inside units alone",
    ),
    "a backward hook between blocks": (
        lambda: with_(
            Net(), lambda net: net.last.register_full_backward_hook(lambda _, taken, given: None)
        ),
        "module last: it has a backward hook",
    ),
    "a forward hook of a sequence": (
        lambda: with_(row(), lambda net: net.register_forward_hook(lambda _, given, made: made)),
        "module: it has a forward hook",
    ),
    "a complex parameter": (
        lambda: with_(
            Net(complex_scale),
            lambda net: net.blocks[0].register_parameter(
                "scale", nn.Parameter(torch.ones(WIDTH, dtype=torch.complex64))
            ),
        ),
        r"parameter blocks\.0\.scale: complex64 must be a format of real floats",
    ),
    "whole numbers as a parameter": (
        lambda: with_(
            Net(),
            lambda net: net.register_parameter(
                "number", nn.Parameter(torch.ones(2, dtype=torch.int64), requires_grad=False)
            ),
        ),
        r"parameter number: int64 must be a format of real floats; keep it as a buffer",
    ),
    "a lazy parameter": (
        lambda: row(nn.LazyLinear(WIDTH)),
        r"parameter 1\.weight: it has no shape yet \(a lazy module\)",
    ),
    "sparse gradients": (
        lambda: nn.Sequential(nn.Embedding(5, WIDTH, sparse=True), Mean()),
        "module 0: its gradients are sparse",
    ),
    "nothing to train": (
        lambda: Net().requires_grad_(requires_grad=False),
        "module: it has no parameter that is trained",
    ),
    "a parameter that is written": (
        lambda: Net(clamps),
        r"unit blocks\.0: its forward writes parameter inner\.weight in place",
    ),
    "a parameter that is written past autograd": (
        lambda: Net(clamps_data),
        r"unit blocks\.0: its forward writes parameter inner\.weight in place",
    ),
    "a parameter that a unit of a row writes": (
        lambda: row(Block(clamps)),
        r"unit 1: its forward writes parameter 1\.inner\.weight in place",
    ),
    "an input that is written": (
        lambda: Net(doubles_input),
        r"unit blocks\.0: its forward writes what it is called with in place",
    ),
    "an input that a unit of a row writes": (
        lambda: row(nn.ReLU(inplace=True)),
        "unit 1: its forward writes what it is called with in place",
    ),
    "a file that blocks write": (
        lambda: with_(Net(), writes_file),
        "module: run by units it makes a loss of",
    ),
    "a batch that is written": (Overwriting, "module: its forward writes its batch in place"),
    "a hook on an input": (
        lambda: Net(hooks_input),
        r"unit blocks\.0: its forward puts a hook on what it is called with",
    ),
    "a hook on what a block returned": (
        lambda: with_(Net(), lambda net: setattr(net, "between", hooks_output)),
        "module: its forward puts a hook on a parameter, or on what a block returned",
    ),
    "a list that a block changes": (
        Appending,
        r"unit blocks\.0: it changes a list or dict that it is called with",
    ),
    "requires_grad set between blocks": (
        lambda: with_(Net(), lambda net: setattr(net, "between", freezes)),
        r"module: its forward sets requires_grad of first\.weight",
    ),
    "a buffer made of activations between blocks": (
        lambda: with_(Net(), lambda net: setattr(net, "between", keeps_mean)),
        r"module: its forward makes buffer blocks\.0\.mean of what depends on parameters",
    ),
    "a module that is compiled as a whole": (
        lambda: cast("nn.Module", torch.compile(Net(), backend="eager")),
        r"module: torch\.compile has wrapped it whole",
    ),
    "another format than the strategy's": (
        lambda: Net().double(),
        r"module: its forward fails in fp32, .* has torch\.float64 \(train\.precision\?\)",
    ),
}


@pytest.mark.parametrize("name", MAKE)
def test_what_would_be_trained_otherwise_is_refused_in_one_line(name: str) -> None:
    make, line = MAKE[name]
    module = make()
    given = batch(0).double() if "format" in name and "whole" not in name else batch(0)
    with pytest.raises((RefusedError, ModuleUnitError)) as caught:
        Trainer(module, sgd(3), batch=given)
    assert re.match(line, str(caught.value)), str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("module", "source", "line"),
    [
        (len, sgd(3), "module: a builtin_function_or_method must be a torch.nn.Module"),
        (row(), {"stage": 3}, "source: a dict must be a Schedule, a Strategy, or a scenario"),
    ],
)
def test_arguments_of_another_kind_are_told_in_one_line(
    module: Any,  # noqa: ANN401
    source: Any,  # noqa: ANN401
    line: str,
) -> None:
    with pytest.raises(RefusedError, match=re.escape(line)):
        Trainer(module, source, batch=batch(0))


def test_an_optimizer_that_has_trained_is_refused_unless_it_may_begin_anew() -> None:
    module, given = Net(), batch(0)
    optimizer = torch.optim.AdamW(module.parameters(), lr=RATE)
    module(given).backward()
    optimizer.step()
    with pytest.raises(RefusedError, match=r"optimizer: it has .* of an earlier training"):
        Trainer(module, sgd(3), batch=given, optimizer=optimizer)
    again = Trainer(module, sgd(3), batch=given, optimizer=optimizer, option=Option(restart=True))
    again.step(given)
    again.finish()
