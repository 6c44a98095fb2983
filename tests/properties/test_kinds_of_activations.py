"""Kinds of activations: all that lives from forward into backward is reported as saved."""

from collections.abc import Iterator

import pytest
from drawn import jobs
from drawn_emulated import emulated_jobs, pipelined_jobs
from drawn_examples import examples
from emulated_strategies import CHECKPOINTED, strategy
from fitting import fitting
from hypothesis import given

from zsim.model.architecture import GPT
from zsim.model.model import Model
from zsim.runtimes.registry import make_schedule
from zsim.schedule.operation import BACKWARDS, Action, Allocate, Compute, Free, Role, walk
from zsim.schedule.schedule import Kind, Program
from zsim.strategy.activations import Checkpointing
from zsim.strategy.strategy import Strategy

FORWARDS = (Action.LOAD, Action.FORWARD)


def kept(program: Program) -> Iterator[str]:
    """Yield buffers that live from the forward of a micro-batch into its backward.

    Memory is taken in forward if that is the next to run. What runs again is backward, too.
    """
    work = [
        each
        for each in walk(program.step)
        if isinstance(each, Allocate | Free)
        or (isinstance(each, Compute) and each.action in (*FORWARDS, Action.RECOMPUTE, *BACKWARDS))
    ]
    after: dict[int, Compute] = {}
    following: Compute | None = None
    for number in reversed(range(len(work))):
        each = work[number]
        if isinstance(each, Compute):
            following = each
        elif following is not None:
            after[number] = following
    taken: dict[str, int] = {}
    begun: set[int] = set()
    for number, each in enumerate(work):
        if isinstance(each, Compute):
            if each.action not in FORWARDS:
                begun.add(each.micro_batch)
        elif isinstance(each, Allocate):
            if number in after and after[number].action in FORWARDS:
                taken[each.buffer] = after[number].micro_batch
        elif taken.pop(each.buffer, None) in begun:
            yield each.buffer


def made_in_forward(program: Program) -> set[str]:
    """Return buffers of the values that segments make in forward, and of the batch."""
    return {
        operand.view.buffer
        for each in walk(program.step)
        if isinstance(each, Compute) and each.action in FORWARDS
        for operand in each.operands
        if operand.role is Role.OUTPUT
    }


def need_kinds(job: tuple[Model, Strategy]) -> None:
    for program in make_schedule(*job).programs:
        found = set(kept(program))
        wrong = [each for each in found if program.by_name[each].kind is Kind.WORKSPACE]
        assert not wrong
        made = made_in_forward(program)
        saved = {each for each in made if program.by_name[each].kind is Kind.SAVED}
        assert saved <= found


@given(jobs())
@examples(24)
def test_what_the_stages_keep_for_backward_is_saved(job: tuple[Model, Strategy]) -> None:
    need_kinds(job)


@given(emulated_jobs())
@examples(24)
def test_what_runtimes_keep_for_backward_is_saved(job: tuple[Model, Strategy]) -> None:
    need_kinds(job)


@given(pipelined_jobs())
@examples(10)
def test_what_pipelines_keep_for_backward_is_saved(job: tuple[Model, Strategy]) -> None:
    need_kinds(job)


@pytest.mark.one_commit_in(6)
def test_what_comes_back_from_the_host_is_saved() -> None:
    shape = GPT(layers=3, hidden_size=8, attention_heads=2, sequence_length=4, vocab_size=13)
    for named in CHECKPOINTED.values():
        job = strategy(named, data=2, micro_batches=2, checkpointing=Checkpointing.FULL)
        assert job is not None
        model = fitting(shape, job)
        need_kinds((model, job))
        for program in make_schedule(model, job).programs:
            back = [each for each in program.buffers if each.name.endswith("/gathered")]
            back = [each for each in back if each.name.removesuffix("/gathered") in model.values]
            assert back
            assert {each.kind for each in back} == {Kind.SAVED}
