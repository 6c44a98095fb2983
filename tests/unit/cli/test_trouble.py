"""`[[fault]]` and `[[neighbour]]` on the command line: what they cost, and what is refused."""

import json
from importlib.resources import files
from pathlib import Path

import pytest

import zsim_scenarios
from zsim.cli.main import answer

TINY = (files(zsim_scenarios) / "tiny.toml").read_text("utf-8").replace("data = 4", "data = 16")


def scenario(folder: Path, *tables: str) -> str:
    path = folder / "troubled.toml"
    path.write_text("\n\n".join([TINY, *tables]), encoding="utf-8")
    return str(path)


SLOW_GPU = """[[fault]]
kind = "gpu"
rank = 3
factor = 1.5"""
NEIGHBOUR = """[[neighbour]]
nodes = [0, 1]
bandwidth_per_direction = "10 GB/s"
end = "1 s"
"""


def dead(node: int, nics: int) -> list[str]:
    return [
        f'[[fault]]\nkind = "nic"\nnode = {node}\nnic = {nic}\ndead = true' for nic in range(nics)
    ]


@pytest.mark.one_commit_in(6)
def test_a_straggler_costs_time_that_the_answer_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert answer(["run", scenario(tmp_path, SLOW_GPU, NEIGHBOUR)]) == 0
    lines = capsys.readouterr().out.splitlines()
    (cost,) = [line for line in lines if line.startswith("faults and neighbours")]
    assert cost.endswith(" without")
    assert len(lines) <= 15
    assert answer(["run", scenario(tmp_path, SLOW_GPU), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert 1 < found["step_time_s"] / found["healthy_step_time_s"] <= 1.5


@pytest.mark.one_commit_in(6)
def test_a_dead_nic_is_worked_around_and_a_node_without_any_is_cut_off(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert answer(["run", scenario(tmp_path, *dead(1, 7))]) == 0
    capsys.readouterr()
    assert answer(["run", scenario(tmp_path, *dead(1, 8))]) == 1
    assert capsys.readouterr().out.splitlines()[1].startswith("cut off: node ")
    assert answer(["run", scenario(tmp_path, *dead(1, 8)), "--json"]) == 1
    assert "no NIC is left" in json.loads(capsys.readouterr().out)["cut"]


LINK = """[[fault]]
kind = "link"
source = "switch"
target = "node1"
dead = true
start = "1 ms"
"""


def test_a_listed_link_that_dies_on_the_way_cuts_off_who_hung_on_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [f"node{node},switch,200 GB/s,1 us" for node in range(2)]
    heading = "source,target,bandwidth_per_direction,latency"
    (tmp_path / "links.csv").write_text("\n".join([heading, *rows]), encoding="utf-8")
    path = scenario(tmp_path, LINK)
    listed = ["--set", "cluster.node=dgx_a100", "--set", f"cluster.fabric={tmp_path}/links.csv"]
    text = Path(path).read_text("utf-8").replace('topology = "dgx_a100_infiniband"', "")
    Path(path).write_text(text, encoding="utf-8")
    assert answer(["run", path, *listed]) == 1
    assert "node1 (1 of 2 nodes) cannot reach the others" in capsys.readouterr().out
    later = text.replace("1 ms", "1000 s")  # the run is over by then
    Path(path).write_text(later, encoding="utf-8")
    assert answer(["run", path, *listed]) == 0


@pytest.mark.matrix(6)
@pytest.mark.parametrize(
    ("table", "message"),
    [
        (
            LINK + "rail = 0",
            "fault.0.rail: unknown key; allowed: start, end, factor, dead, probability, links, "
            "kind, source, target",
        ),
        ('[[fault]]\nkind = "nic"\nnode = 0', "fault.0.nic: missing"),
        (
            SLOW_GPU.replace("3", "16"),
            "fault.0.rank: 16 must be 0 to 15: there are 16 ranks",
        ),
        (
            NEIGHBOUR.replace("[0, 1]", "[0, 2]"),
            "neighbour.0.nodes: 2 must be 0 to 1: there are 2 nodes",
        ),
        (
            SLOW_GPU + "\nnode = 1",
            "fault.0.node: unknown key; allowed: start, end, kind, rank, factor",
        ),
        (
            SLOW_GPU.replace("1.5", '"1/2"'),
            "fault.0.factor: '1/2' must be at least 1, times slower",
        ),
        (SLOW_GPU + '\nstart = "soon"', "fault.0.start: 'soon' must be a time such as \"1.5 s\""),
        (
            '[[fault]]\nkind = "spine"\ngroup = 0\nfactor = 2',
            "fault.0.kind: 'spine' has no uplinks here; with some: none",
        ),
        (
            NEIGHBOUR.replace("[0, 1]", "[1, 1]"),
            "neighbour.0.nodes: 1 to 1 must be two or more, ascending",
        ),
    ],
)
def test_trouble_that_cannot_be_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], table: str, message: str
) -> None:
    path = scenario(tmp_path, table)
    assert answer(["run", path]) == 2
    assert capsys.readouterr().err == f"zsim: {path}: {message}\n"


def test_only_the_simulation_knows_trouble(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert answer(["run", scenario(tmp_path, SLOW_GPU), "--backend", "null"]) == 2
    assert capsys.readouterr().err == "zsim: fault, neighbour: backend null simulates none\n"
