"""Named kinds of faults in schedules of every stage and runtime are found, each by its family."""

from collections.abc import Iterator
from itertools import islice

import numpy as np
import pytest
from edits.columns import Case, cases, strategies
from edits.programs import Edit
from edits.table import AIMED

from zsim.proof import check

FEW = {
    "stage 0": 1,
    "stage 1": 1,
    "stage 2": 1,
    "stage 3": 2,
    "deepspeed 2 overlapped": 1,
    "deepspeed 3": 1,
    "fsdp1": 1,
    "fsdp2 reduced in fp32": 1,
    "megatron overlapped": 1,
    "nanotron 1": 1,
    "pipelines": 2,
    "frozen, stage 1": 1,
    "frozen, stage 3": 1,
    "frozen, fsdp2": 1,
    "frozen, deepspeed 2": 1,
    "frozen, deepspeed 3": 1,
}
"""Columns of the table of edits, and how many of their schedules."""
COLUMNS = list(strategies())
ORDER = {"lifetime", "races", "matching", "progress"}
KINDS = {
    "rate times 1000 in every update": "values",
    "other beta1": "values",
    "other epsilon": "values",
    "weight decay": "values",
    "SGD for Adam": "values",
    "SGD for Adam in one update": "values",
    "no momentum": "values",
    "no momentum in one update": "values",
    "other momentum": "values",
    "no Nesterov momentum": "values",
    "rule of another group": "values",
    "rule of another group in one update": "values",
    "rules of groups swapped": "values",
    "one element in another group": "values",
    "moments of another group": "values",
    "constant for a given learning rate": "values",
    "constant for a given learning rate in one update": "values",
    "another given number for a learning rate": "values",
    "another given number for a learning rate in one update": "values",
    "given learning rate halved": "values",
    "given learning rate for a step number": "values",
    "Adam without a step number": "values",
    "Adam with good steps for a step number": "values",
    "first moment begins at 1": "values",
    "second moment begins at 1": "values",
    "update twice at half the rate": "values",
    "parameters begin at 0": "values",
    "gradients kept in bf16": "formats",
    "ranks added up in bf16": "formats",
    "norm in bf16": "formats",
    "master in a poorer format": "formats",
    "moment in a poorer format": "formats",
    "one rank divides after the reduction": "values",
    "one rank twice, others nothing": "values",
    "tensor ranks add up a scratch copy": "values",
    "tensor ranks add up nothing, unmarked": "values",
    "flag covers one gradient": "values",
    "flag misses the last gradient": "values",
    "flag misses the last element": "values",
    "flag over other ranks": "values",
    "norm of this rank alone": "values",
    "clipped at another norm": "values",
    "clipped by a norm of scaled gradients": "values",
    "overflow branch inverted": "values",
    "scale does not fall": "scalars",
    "scale falls further": "scalars",
    "scale falls below its least": "scalars",
    "scale never grows": "scalars",
    "scale grows at another interval": "scalars",
    "good steps are not forgotten": "scalars",
    "step counted on overflow": "scalars",
    "first step is the second": "scalars",
    "loss scale begins otherwise": "scalars",
    "micro-batch loaded twice": "values",
    "gradient of another micro-batch": "values",
    "frozen parameter updated": "values",
    "frozen parameter updated on one rank": "values",
    "frozen parameter decays": "values",
    "frozen parameter cleared": "values",
    "frozen parameter not gathered": "volume",
    "frozen parameter begins otherwise": "values",
    "frozen parameter has a gradient": "values",
    "frozen parameter reduced": "values",
    "frozen parameter in the norm": "values",
    "trained parameter taken for frozen": "values",
    "frozen parameter taken for trained": "values",
}
"""By kind of fault the family that finds it where the order of operations is right."""


@pytest.fixture(scope="module")
def some() -> list[Case]:
    return [case for column, count in FEW.items() for case in islice(cases(column), count)]


def found_by(case: Case, edit: Edit) -> set[str]:
    """The families that find something."""
    return {each.invariant for each in check(edit.schedule, case.model)}


def missed(case: Case, edit: Edit, found: set[str], families: set[str]) -> str:
    """What is wrong with what check says of an edit; nothing if that is right."""
    if found & families:
        return ""
    if found:
        return f"{case.label}, {edit.text}: found by {found}"
    verdict = case.court.judge(edit.schedule, np.random.default_rng(0))
    return f"{case.label}, {edit.text}: {verdict}" if verdict.is_wrong else ""


@pytest.mark.matrix(5)
@pytest.mark.parametrize("name", KINDS)
def test_a_named_fault_is_found_by_its_family(name: str, some: list[Case]) -> None:
    """In every fourth schedule that can express it; the long test takes all."""
    families = {KINDS[name], *ORDER, "volume"}
    able = [(case, edit) for case in some for edit in islice(AIMED[name](case.schedule), 1)]
    by_family = False
    for turn in range(4):
        edits = able[turn::4]
        found = [found_by(case, edit) for case, edit in edits]
        wrong = [missed(*pair, by, families) for pair, by in zip(edits, found, strict=True)]
        assert [why for why in wrong if why] == []
        by_family = any(KINDS[name] in each for each in found)
        if by_family:
            break
    assert by_family


def every(case: Case) -> Iterator[Edit]:
    """A few edits of every kind."""
    for aim in AIMED.values():
        yield from islice(aim(case.schedule), 3)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("column", COLUMNS)
def test_what_is_passed_is_right(column: str) -> None:
    families = {*KINDS.values(), *ORDER, "volume", "memory", "issue order"}
    found = [
        why
        for case in cases(column)
        for edit in every(case)
        if (why := missed(case, edit, found_by(case, edit), families))
    ]
    assert found == []
