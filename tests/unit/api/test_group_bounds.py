"""Bounds of groups do not depend on the parts in which they are computed."""

import pickle
from concurrent.futures import Executor

import pytest

from zsim.workers.processes import InProcess
from zsim_plan.answer.best_question import Question, question_of
from zsim_plan.answer.group_bounds import bounds_of, in_parts
from zsim_plan.answer.setting_pool import SettingPool
from zsim_plan.search.space import SettingGroup

SMALL = ("model.layers=2", "model.sequence_length=256", "model.vocab_size=1000")


@pytest.fixture(scope="module")
def asked() -> Question:
    settings = (*SMALL, "zero.stage=1", "activations.checkpointing=none")
    return question_of("llama3.2-1b", "4xh100", settings, batch_tokens=256 * 8, among=("megatron",))


@pytest.fixture(scope="module")
def groups(asked: Question) -> list[SettingGroup]:
    return [each for each in asked.space().groups() if isinstance(each, SettingGroup)]


def test_every_group_is_in_one_part_with_all_that_share_its_models(
    groups: list[SettingGroup],
) -> None:
    parts = in_parts(enumerate(groups))
    assert len(parts) > 2
    assert sorted(number for part in parts for number in part) == [*range(len(groups))]
    for part in parts:
        assert len({each.model_key for each in part.values()}) == 1


@pytest.mark.parametrize("sure_only", [False, True])
def test_parts_have_the_bounds_of_all_groups_together(
    asked: Question, groups: list[SettingGroup], *, sure_only: bool
) -> None:
    whole = bounds_of(asked, groups, sure_only=sure_only)
    assert any(each.step_time_s for each in whole)
    sent: Question = pickle.loads(pickle.dumps(asked))
    for part in in_parts(enumerate(groups)):
        bounds = bounds_of(sent, [*part.values()], sure_only=sure_only)
        assert bounds == [whole[number] for number in part]


def bounded(asked: Question, executor: Executor) -> SettingPool:
    pool = SettingPool(asked)
    assert pool.unbounded
    for _ in pool.bound_others(executor):
        pass
    return pool


def test_groups_are_added_in_the_order_of_the_space(
    asked: Question, groups: list[SettingGroup]
) -> None:
    pool = bounded(asked, InProcess())
    assert not pool.unbounded
    order = [groups.index(each) for each in pool.groups]
    assert order == sorted(order)
    assert len(pool.groups) == len(pool.bounds)
    assert sum(len(each.knobs) for each in pool.groups) + pool.refused.total() == pool.settings


def test_more_gpus_are_bounded_only_where_fewer_may_not_suffice() -> None:
    settings = (*SMALL, "zero.stage=1", "activations.checkpointing=none", "parallel.tensor=1")
    for memory, gpus in (("80 GB", 1), ("2.6 GB", 2)):
        asked = question_of(
            "llama3.2-1b",
            "8xh100",
            (*settings, f"cluster.gpu_memory={memory}"),
            batch_tokens=256 * 8,
            among=("megatron",),
            objective="gpus",
        )
        pool = SettingPool(asked)
        assert pool.bound_more_gpus(InProcess())
        sure = [
            group.fleet.gpus
            for group, bound in zip(pool.groups, pool.bounds, strict=True)
            if not bound.is_unsure
        ]
        assert {*sure} == {gpus}
        assert {each.fleet.gpus for each in pool.unbounded.values()} == {
            each for each in (2, 4, 8) if each > gpus
        }
        known = len(pool.groups)
        pool.leave_more_gpus()
        assert not pool.unbounded
        assert not pool.bound_more_gpus(InProcess())
        added = sum(len(each.knobs) for each in pool.groups)
        assert added + pool.refused.total() == pool.settings
        left_out = [branch.bound for branch in pool.branches(known)]
        assert {*left_out} == {asked.value(0.0, each) for each in (2, 4, 8) if each > gpus}
