"""Bugs of released runtimes are found, and the same code mended has no finding."""

import pytest
from faults.fault import Fault
from faults.judge import Outcome, judge
from faults.of_executor.recordings import BugRun
from faults.of_executor.registry import RUNTIMES
from faults.of_executor.runtimes import Bug

RUN = BugRun("a pretended device")


def test_there_are_twenty() -> None:
    assert len(RUNTIMES) >= 20


@pytest.mark.matrix(5)
@pytest.mark.parametrize("fault", RUNTIMES, ids=str)
def test_a_planted_bug_is_found_once_and_its_mended_version_is_clean(
    fault: Fault[str, Bug],
) -> None:
    (mutant,) = fault.mutants(RUN.subject)
    verdict = judge(fault, mutant, RUN)
    assert verdict.outcome is Outcome.FOUND
    assert verdict.is_named
    assert [len(each) for each in RUN.findings(mutant.made).values()] == [1]
    assert RUN.findings(mutant.made, mended=True) == {}
