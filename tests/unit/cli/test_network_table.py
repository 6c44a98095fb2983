"""`[network]`: the algorithm of collectives, on the command line."""

import json

import pytest

from zsim.cli.main import answer


def step_time_s(capsys: pytest.CaptureFixture[str], *settings: str) -> float:
    words = ["run", "tiny", "--set", "parallel.data=16", "--no-check", "--json"]
    for setting in settings:
        words += ["--set", setting]
    assert answer(words) == 0
    return float(json.loads(capsys.readouterr().out)["step_time_s"])


def test_the_algorithm_of_collectives_can_be_forced(capsys: pytest.CaptureFixture[str]) -> None:
    ring_s = step_time_s(capsys, "network.algorithm=ring")
    staged_s = step_time_s(capsys, "network.algorithm=hierarchical")
    assert staged_s != ring_s
    # Each chunk pays the hops of its stages: more of them cost more where messages are small.
    assert step_time_s(capsys, "network.algorithm=hierarchical", "network.chunks=64") > staged_s


def test_an_algorithm_that_does_not_exist_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(["run", "tiny", "--set", "network.algorithm=star"]) == 2
    assert capsys.readouterr().err == (
        "zsim: tiny: network.algorithm: 'star' must be 'ring', 'tree', 'nvls' or 'hierarchical'\n"
    )


def test_fitted_constants_change_what_collectives_cost_and_are_named_if_unknown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    nominal_s = step_time_s(capsys)
    assert step_time_s(capsys, "network.profile=a100") > nominal_s
    assert answer(["run", "tiny", "--set", "network.profile=abacus"]) == 2
    message = capsys.readouterr().err
    assert message.startswith("zsim: tiny: network.profile: 'abacus' must be one of a100, ")
    assert "h100/aws_p5" in message


def test_an_algorithm_is_for_the_simulation_alone(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["run", "tiny", "--backend", "null", "--set", "network.algorithm=ring"]
    assert answer(words) == 2
    assert capsys.readouterr().err == "zsim: network.algorithm: backend null takes its own\n"
