"""Every scenario that ships runs, and says what stands beside it in NAME.out.

After a change that means to change an answer: `zsim run NAME > scenarios/zsim_scenarios/NAME.out`.
"""

import re
from importlib.resources import files

import pytest

import zsim
import zsim_scenarios
from zsim.analysis.memory_footprint import footprint
from zsim.analysis.out_of_memory import alive_text
from zsim.cli.main import answer
from zsim.files.source import Changes, read

FITS = re.compile(r"fits +(yes|(probably|uncertain) \(probability \d+%\)):")
SLOW = {"infinity_32t"}
"""397 layers with every state in files: its proof takes most of a minute."""


@pytest.mark.matrix(24)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.long] if name in SLOW else [])
        for name in zsim_scenarios.names()
    ],
)
def test_a_scenario_that_ships_says_what_was_recorded(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded = (files(zsim_scenarios) / f"{name}.out").read_text("utf-8")
    assert answer(["run", name]) == 0
    assert capsys.readouterr().out == recorded


def test_the_promised_scenarios_ship() -> None:
    assert {"zero_100b", "zero_table1", "tiny"} <= set(zsim_scenarios.names())
    assert {"infinity_1t", "infinity_32t", "zero_offload_13b"} <= set(zsim_scenarios.names())


@pytest.mark.parametrize("name", zsim_scenarios.names())
def test_what_was_recorded_of_a_scenario_fits(name: str) -> None:
    recorded = (files(zsim_scenarios) / f"{name}.out").read_text("utf-8")
    assert FITS.match(recorded.splitlines()[1])


@pytest.mark.parametrize("name", zsim_scenarios.names())
def test_a_title_fits_a_line(name: str) -> None:
    assert len(zsim.load(name).title) <= 60


def test_an_unknown_scenario_is_a_lookup_error_with_those_that_ship() -> None:
    with pytest.raises(LookupError, match=r"'abacus' must be one of .*zero_100b"):
        zsim_scenarios.text("abacus")


@pytest.mark.one_commit_in(6)
def test_the_100_billion_run_fits_with_partitioned_checkpoints_alone() -> None:
    recorded = (files(zsim_scenarios) / "zero_100b.out").read_text("utf-8")
    assert FITS.match(recorded.splitlines()[1])
    whole = Changes(settings=("activations.partition=false",))
    taken = footprint(read("zero_100b", whole).job())
    assert not taken.fits
    assert taken.shortage is not None
    assert alive_text(taken.shortage).startswith("activations 67.1 GB")  # whole ones on every rank
