"""The number of commits until the tests have planted each fault, on average.

    PYTHONPATH=tests/support python -m faults.rotation

A test plants a fault that is one of its parameters. Each case of a matrix (`matrix(n)`) runs for
one of n commits, as `rotation` draws them, and one marked `one_commit_in(n)` runs for one of n
commits; tests marked `long` or `studies` run for none.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path

import pytest

from faults.fault import Fault

ROOT = Path(__file__).parents[3]
PLANTING = (
    "tests/properties/test_faults_of_schedules.py",
    "tests/properties/test_fewer_micro_batches.py",
    "tests/properties/test_micro_batches_that_repeat.py",
    "tests/properties/test_refinement.py",
    "tests/properties/test_repeated_blocks.py",
    "tests/unit/proof/test_fewer_micro_batches.py",
    "tests/unit/torch/record/test_executor_mutants.py",
    "tests/unit/torch/record/test_fsdp_matrix.py",
    "tests/unit/torch/record/test_planted_races.py",
    "tests/unit/torch/record/test_rank_mutants.py",
    "tests/unit/torch/test_witnesses.py",
)
"""Files whose tests plant faults of the table."""


@dataclass(frozen=True)
class Case:
    """A case of a test that plants a fault."""

    nodeid: str
    fault: str
    one_of: int
    one_commit_in: int
    is_rare: bool

    @property
    def test(self) -> str:
        """The test without its parameters."""
        return self.nodeid.partition("[")[0]


@dataclass
class Cases:
    """A pytest plugin that notes the cases that plant faults."""

    found: list[Case] = field(default_factory=list[Case])

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Note the cases."""
        for item in items:
            call = getattr(item, "callspec", None)
            for value in () if call is None else call.params.values():
                if isinstance(value, Fault):
                    self.found.append(_case(item, value))


def _case(item: pytest.Item, fault: Fault[object, object]) -> Case:
    marker, seldom = item.get_closest_marker("matrix"), item.get_closest_marker("one_commit_in")
    rare = any(item.get_closest_marker(name) is not None for name in ("long", "studies"))
    one_of = 1 if marker is None else int(marker.args[0])
    one_commit_in = 1 if seldom is None else int(seldom.args[0])
    return Case(item.nodeid, fault.id, one_of, one_commit_in, rare)


def collect(files: Sequence[str] = PLANTING) -> Cases:
    """Return the cases of test files that plant faults; nothing is run."""
    cases = Cases()
    arguments = ["--collect-only", "-qq", "--noconftest", "-p", "no:cacheprovider", "-m", ""]
    status = pytest.main(
        [*arguments, "-c", str(ROOT / "pyproject.toml"), *(str(ROOT / each) for each in files)],
        plugins=[cases],
    )
    assert status == pytest.ExitCode.OK, f"collection ends with {status}"
    return cases


def commits(cases: Cases) -> dict[str, Fraction | None]:
    """Return the expected number of commits until each fault is planted; None is never.

    The cases of one test that plant a fault are taken for one: seldom is more than one drawn.
    """
    by_fault: dict[str, dict[str, Case]] = defaultdict(dict)
    for each in cases.found:
        known = by_fault[each.fault].get(each.test)
        if known is None or known.is_rare:
            by_fault[each.fault][each.test] = each
    return {fault: _expected(tests.values()) for fault, tests in by_fault.items()}


def _expected(cases: Iterable[Case]) -> Fraction | None:
    """Return the expected number of commits until one of independent cases runs."""
    missed = Fraction(1)
    for each in cases:
        if not each.is_rare:
            missed *= 1 - Fraction(1, each.one_of * each.one_commit_in)
    return None if missed == 1 else 1 / (1 - missed)


def by_group(found: Mapping[str, Fraction | None]) -> dict[str, list[Fraction | None]]:
    """Return the expected numbers of commits by group of faults."""
    groups: dict[str, list[Fraction | None]] = defaultdict(list)
    for fault, number in found.items():
        groups[fault.partition(":")[0]].append(number)
    return groups


def lines(found: Mapping[str, Fraction | None]) -> Iterator[str]:
    """Yield for each group of faults the expected number of commits, of the rarest fault."""
    yield f"{'group':16}{'faults':>7}{'commits':>9}"
    for group, numbers in by_group(found).items():
        known = [each for each in numbers if each is not None]
        worst = f"{float(max(known)):9.1f}" if len(known) == len(numbers) else f"{'never':>9}"
        yield f"{group:16}{len(numbers):>7}{worst}"


if __name__ == "__main__":
    print(*lines(commits(collect())), sep="\n")  # noqa: T201  # the table is what this is for
