"""Units that `torch.compile` has compiled in place train as they do uncompiled."""

from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import Any

import pytest
import torch
from tiny_training import UNITS, WIDTH, Case, Middle, Tiny, values
from torch import nn

from zsim.strategy.activations import Activations, Checkpointing
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim_torch import Trainer
from zsim_torch.module.compiled import is_compiled, uncompiled

# The compiler hides this warning by a filter, which is overruled here: warnings are errors.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")

COMPILER = import_module("torch._dynamo")  # torch has no public name for what looks a backend up
Backend = Callable[[torch.fx.GraphModule, list[torch.Tensor]], Any] | str
Found = tuple[list[float], dict[str, torch.Tensor]]


class CountedGraphs:
    """A backend that runs the graphs, differentiated by the compiler, and counts them."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:  # noqa: ANN401
        self.count += 1
        return COMPILER.lookup_backend("aot_eager")(graph, inputs)


@pytest.fixture(autouse=True)
def nothing_compiled_before() -> Iterator[None]:
    yield
    torch.compiler.reset()


def trained(strategy: Strategy, backend: Backend | None, units: Sequence[str] | None) -> Found:
    case, module = Case(strategy, steps=3), Tiny(Precision.FP32)
    if backend is not None:
        for each in (module.first, module.middle, module.last):
            each.compile(backend=backend)
    with Trainer(module, strategy, units=units, batch=case.batch(0, 0, 0)) as trainer:
        losses = [trainer.step(case.batch(step, 0, 0)).item() for step in range(case.steps)]
    return losses, values(module)


STRATEGIES = {
    **{
        f"stage {stage}": Strategy(parallel=Parallel(data=1), zero=Zero(stage=stage))
        for stage in range(4)
    },
    "recomputed": Strategy(
        parallel=Parallel(data=1),
        zero=Zero(stage=3),
        activations=Activations(checkpointing=Checkpointing.FULL),
    ),
}


@pytest.mark.matrix(15)
@pytest.mark.parametrize("name", STRATEGIES)
def test_compiled_units_train_to_the_bits_of_others(name: str) -> None:
    graphs = CountedGraphs()
    losses, left = trained(STRATEGIES[name], graphs, UNITS)
    expected, theirs = trained(STRATEGIES[name], None, UNITS)
    assert losses == expected
    assert all(torch.equal(left[key], theirs[key]) for key in theirs)
    # One of each unit that trains: they are compiled once, not given up, and nothing else is.
    assert len(UNITS) <= graphs.count <= 2 * len(UNITS)


class Chain(nn.Module):
    """Equal blocks, which are found."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Middle() for _ in range(3)])

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return hidden.sum()


@pytest.mark.one_commit_in(6)
def test_units_that_are_found_may_be_compiled() -> None:
    graphs, batch = CountedGraphs(), torch.ones(2, WIDTH)

    def losses(module: Chain) -> list[float]:
        with Trainer(module, STRATEGIES["stage 3"], batch=batch) as trainer:
            return [trainer.step(batch).item() for _ in range(3)]

    compiled = Chain()
    for each in compiled.blocks:
        each.compile(backend=graphs)
    assert losses(compiled) == losses(Chain())
    assert graphs.count


def test_a_module_is_described_as_it_is_written_and_compiled_again_afterwards() -> None:
    module = Tiny(Precision.FP32)
    module.middle.compile(backend="eager")
    assert is_compiled(module)
    with uncompiled(module.modules()):
        assert not is_compiled(module)
    assert is_compiled(module.middle)
    assert not is_compiled(module.first)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_inductor_trains_but_for_rounding() -> None:
    for strategy in STRATEGIES.values():
        losses, left = trained(strategy, "inductor", UNITS)
        expected, theirs = trained(strategy, None, UNITS)
        assert losses == pytest.approx(expected, rel=1e-5)
        for key, value in theirs.items():
            torch.testing.assert_close(left[key], value, rtol=1e-4, atol=1e-5)
