"""Numbers that forwards keep past torch: they are those of torch, or the module is refused."""

import copy
import itertools
import re
from collections.abc import Callable
from typing import Any

import kept_numbers
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kept_numbers import PLACES, Counted, counted, counts_alone, numbers
from odd_modules import RATE, Block, Mean, Net, batch, plain_block, sgd
from torch import Tensor

from zsim_torch.module.description import describe
from zsim_torch.module.meta_model import model_from
from zsim_torch.module.unit import ModuleUnitError
from zsim_torch.trainer import Trainer

STEPS, PARTS = 3, 2
EVENT = st.tuples(st.integers(0, 4), st.booleans(), st.sampled_from(sorted(PLACES)))

UNITS = ("first", "blocks.0", "blocks.1", "last")
NAMED_BY_ALL = ("a global", "a global list")
"""Places that functions of `Counted` name, so that all of them are taken to read them."""

Event = tuple[int, bool, str]


def by_torch(events: list[Event]) -> tuple[list[float], dict[str, float]]:
    module = counted(events)
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE)
    losses: list[float] = []
    for step in range(STEPS):
        optimizer.zero_grad()
        found = [module(batch(PARTS * step + part)) for part in range(PARTS)]
        mean = torch.stack(found).mean()
        mean.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(float(mean.detach()))
    return losses, numbers(module)


def by_zsim(events: list[Event], stage: int) -> tuple[list[float], dict[str, float]]:
    module = counted(events)
    before = numbers(module)
    chosen = sgd(stage).but({"train.gradient_accumulation_steps": PARTS})
    with Trainer(module, chosen, batch=batch(0)) as trainer:
        assert numbers(module) == before
        losses = [
            float(trainer.step(*(batch(PARTS * step + part) for part in range(PARTS))))
            for step in range(STEPS)
        ]
    return losses, numbers(module)


@pytest.mark.matrix(12)
@pytest.mark.parametrize("kind", [each for each in PLACES if each not in NAMED_BY_ALL])
@pytest.mark.parametrize("place", [1, 2])
def test_a_number_that_is_counted_and_read_in_one_place_is_that_of_torch(
    kind: str, place: int
) -> None:
    events = [(place, True, kind), (place, False, kind)]
    losses, kept = by_torch(events)
    found, its = by_zsim(events, stage=3)
    assert found == pytest.approx(losses, rel=1e-6)
    assert its == kept


@pytest.mark.parametrize("kind", PLACES)
def test_a_number_that_a_block_leaves_for_code_between_blocks_is_refused(kind: str) -> None:
    line = r"unit blocks\.0: (its forward changes .*; return it|what it makes is read by)"
    with pytest.raises(ModuleUnitError, match=line):
        by_zsim([(1, True, kind), (4, False, kind)], stage=3)


@pytest.mark.parametrize("kind", PLACES)
def test_a_number_that_is_changed_after_a_block_has_read_it_is_refused(kind: str) -> None:
    with pytest.raises(
        ModuleUnitError, match=r"after unit blocks\.0 has read it; change it before"
    ):
        by_zsim([(1, False, kind), (4, True, kind)], stage=3)


@pytest.mark.one_commit_in(15)
@settings(max_examples=25)
@given(st.lists(EVENT, min_size=1, max_size=6), st.integers(0, 3))
def test_numbers_that_pass_between_blocks_and_code_around_are_those_of_torch_or_refused(
    events: list[Event], stage: int
) -> None:
    losses, kept = by_torch(events)
    try:
        found, its = by_zsim(events, stage)
    except ModuleUnitError as error:
        line = str(error)
    else:
        assert found == pytest.approx(losses, rel=1e-5)
        assert its == kept
        return
    assert re.match(r"(unit blocks\.\d|module): (its forward changes|what it makes is)", line), line


def test_a_global_that_blocks_alone_count_is_that_of_torch() -> None:
    kept_numbers.of_blocks = 0
    module = Net(counts_alone)
    plain = copy.deepcopy(module)
    wanted = [float(plain(batch(0)).detach()), kept_numbers.of_blocks]
    kept_numbers.of_blocks = 0
    with Trainer(module, sgd(3), batch=batch(0)) as trainer:
        found = [float(trainer.step(batch(0))), kept_numbers.of_blocks]
    assert found == pytest.approx(wanted, rel=1e-6)


class Tally:
    """A hook of a forward that counts."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, module: object, given: object, made: Tensor) -> Tensor:
        self.count += 1
        return made * (1 + 0.1 * self.count)


def test_a_hook_that_is_an_object_keeps_its_number() -> None:
    module = Net()
    hooks = [Tally(), Tally()]
    for block, hook in zip(module.blocks, hooks, strict=True):
        block.inner.register_forward_hook(hook)
    with Trainer(module, sgd(3), batch=batch(0)) as trainer:
        trainer.step(batch(0))
    assert [each.count for each in hooks] == [1, 1]


def module_that_calls(count: Callable[[], float]) -> Net:
    torch.manual_seed(0)
    return Net(lambda block, x: plain_block(block, x * (1 + 0.1 * count())))


@pytest.mark.parametrize("count", kept_numbers.COUNTERS.values(), ids=kept_numbers.COUNTERS.keys())
def test_a_number_of_another_file_or_an_object_of_the_library_is_that_of_torch(
    count: Callable[[], float],
) -> None:
    before = count()
    with Trainer(module_that_calls(count), sgd(3), batch=batch(0)) as trainer:
        trainer.step(batch(0))
    assert count() == before + 3


@pytest.mark.parametrize(
    "measure",
    [
        lambda module: describe(module, None, batch(0)),
        lambda module: describe(module, [*UNITS, ("loss", Mean())], batch(0)),
        lambda module: model_from(module, [batch(0)]),
    ],
)
def test_a_module_that_is_measured_keeps_its_numbers(measure: Callable[[Counted], object]) -> None:
    module = counted([(1, True, kind) for kind in PLACES if kind not in NAMED_BY_ALL])
    before = numbers(module)
    measure(module)
    assert numbers(module) == before


def test_a_block_that_leaves_a_number_in_a_later_step_is_refused_in_that_step() -> None:
    torch.manual_seed(0)
    module: Any = Net()
    module.flag, module.calls = 1.0, 0

    def within(block: Block, x: Tensor) -> Tensor:
        module.calls += 1
        module.flag = 2.0 if module.calls > 4 else module.flag
        return plain_block(block, x)

    for block in module.blocks:
        block.within = within
    module.between = lambda net, x: x * net.flag
    trainer = Trainer(module, sgd(3), batch=batch(0))
    for step in range(2):
        trainer.step(batch(step))
    with pytest.raises(ModuleUnitError, match="module: a block changes flag, which code between"):
        trainer.step(batch(2))


@pytest.mark.parametrize(
    "made",
    [
        itertools.count,
        lambda: iter([1, 2, 3, 4, 5, 6, 7, 8] * 9),
        lambda: zip(range(99), range(99), strict=True),
    ],
)
def test_an_iterator_that_a_forward_advances_is_refused(made: Callable[[], Any]) -> None:
    module: Any = Net()
    module.left = made()

    def within(block: Block, x: Tensor) -> Tensor:
        next(module.left)
        return plain_block(block, x)

    module.blocks[0].within = within
    with pytest.raises(ModuleUnitError, match=r"module: its forward advances left, an iterator"):
        Trainer(module, sgd(3), batch=batch(0))


def test_a_generator_that_a_forward_advances_is_refused() -> None:
    module: Any = Net()
    module.between = lambda net, x: x * next(net.left)
    module.left = (1.0 for _ in range(99))
    with pytest.raises(ModuleUnitError, match=r"module: its forward advances left, an iterator"):
        Trainer(module, sgd(3), batch=batch(0))
