"""What `zsim run` says of memory: of a host that waits for it, of a run that does not fit."""

import csv
import json
import re
from pathlib import Path

import pytest
from command_answers import Ask

from zsim.cli.main import answer

SMALL = ("run", "tiny", "--set", "cluster.gpu_memory=1 MB")
STUDY = """
question = "How much memory does it need?"
[base]
scenario = "tiny"
[[axis]]
field = "cluster.gpu_memory"
values = ["1 MB", "32 GB"]
"""


@pytest.mark.matrix(6)
@pytest.mark.parametrize(("gigabytes", "waits"), [(2000, False), (20, True)])
def test_a_host_that_runs_ahead_waits_for_memory_and_needs_no_more(
    capsys: pytest.CaptureFixture[str], gigabytes: int, *, waits: bool
) -> None:
    settings = (
        "zero.emulate=fsdp1",
        "zero.fsdp1.limit_all_gathers=false",
        "model.layers=40",
        f"cluster.gpu_memory={gigabytes} GB",
    )
    assert answer(["run", "llama2_7b", *(f"--set={each}" for each in settings)]) == 0
    fits = " ".join(capsys.readouterr().out.split())
    reserved = "20 GB" if waits else "106 GB"
    verdict = r"uncertain \(probability \d+%\)" if waits else "yes"
    assert re.search(f"fits {verdict}: reserves {reserved} of 2.* 7.05 GB in tensors", fits)
    assert ("host waits for memory" in fits) is waits


@pytest.mark.matrix(24)
@pytest.mark.parametrize("allocator", ["caching", "expandable"])
def test_a_run_that_does_not_fit_says_what_it_needs_and_nothing_that_looks_like_less(
    ask: Ask, allocator: str
) -> None:
    memory = ("--set=cluster.gpu_memory=3 GB", f"--set=cluster.allocator={allocator}")
    large = ("run", "llama2_7b", "--no-check", "--set=model.layers=8", *memory)
    code, out, _ = ask(*large)
    assert code == 1
    line = " ".join(out.partition("out of memory at")[0].split())
    found = re.search(r"no: tensors need ([\d.]+) GB, more than the 3 GB usable", line)
    assert found is not None
    assert float(found[1]) > 3
    assert json.loads(ask(*large, "--json")[1])["peak_reserved_bytes"] is None


@pytest.mark.one_commit_in(9)
def test_a_run_that_only_fragments_does_not_fit_for_what_it_would_reserve(ask: Ask) -> None:
    # Of 7 GB, 6.33 GB are alive at the peak: what is rounded up, split off and cached is too much.
    code, out, _ = ask("run", "llama2_7b", "--no-check", "--set", "cluster.gpu_memory=7 GB")
    assert code == 1
    line = " ".join(out.split())
    figures = "reserves at least 7.07 GB of 7 GB usable on H100-SXM5-80GB, 6.33 GB in tensors"
    assert re.search(rf"fits\s+probably not \(probability [1-4]\d%\): {figures}", line)


@pytest.mark.one_commit_in(9)
def test_the_page_of_a_run_that_does_not_fit_says_until_when_memory_was_reserved(
    ask: Ask, tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    assert ask(*SMALL, "--report", page)[0] == 1
    text = page.read_text("utf-8")
    assert "are reserved at most" not in text
    assert "It does not fit: it needs 3.09 MB of the 1 MB that a GPU has" in text
    assert "Until memory ran out, 0 B were reserved" in text


def test_a_study_says_nothing_of_what_a_run_reserves_that_does_not_fit(
    ask: Ask, tmp_path: Path
) -> None:
    study, table = tmp_path / "memory.toml", tmp_path / "runs.csv"
    study.write_text(STUDY, "utf-8")
    words = ("sweep", study, "--workers", "1", "--store", tmp_path / "runs.sqlite")
    assert ask(*words, "--csv", table, "--report", tmp_path / "page.html")[0] == 0
    full, fits = csv.DictReader(table.read_text("utf-8").splitlines())
    assert (full["status"], full["peak_reserved_bytes"]) == ("does not fit", "")
    assert int(fits["peak_reserved_bytes"]) > int(fits["peak_allocated_bytes"])


@pytest.mark.one_commit_in(12)
def test_the_next_size_of_the_largest_model_reserves_what_nobody_knows(ask: Ask) -> None:
    found = json.loads(ask("largest", "tiny", "--set", "cluster.gpu_memory=100 MB", "--json")[1])
    assert found["peak_reserved_bytes"] >= found["peak_allocated_bytes"]
    assert found["next"]["peak_reserved_bytes"] is None


def tiers(capsys: pytest.CaptureFixture[str], *settings: str) -> list[dict[str, object]]:
    """Return the tiers of a small run with these settings."""
    assert answer(["run", "tiny", "--json", *(f"--set={each}" for each in settings)]) == 0
    found: list[dict[str, object]] = json.loads(capsys.readouterr().out)["tiers"]
    return found


@pytest.mark.one_commit_in(6)
def test_a_node_holds_the_model_once_for_every_rank_that_builds_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert tiers(capsys) == []
    built = {each: tiers(capsys, f"host.setup={each}") for each in ("one_rank", "every_rank")}
    once, often = (found[0]["needed_bytes"] for found in built.values())
    assert isinstance(once, int)
    assert often == 4 * once
    assert answer(["plan", "tiny", "--json"]) == 0
    assert once == 4 * json.loads(capsys.readouterr().out)["parameters"]


@pytest.mark.one_commit_in(6)
def test_pinned_memory_is_rounded_up_unless_it_is_exact(
    capsys: pytest.CaptureFixture[str],
) -> None:
    offload = ("activations.checkpointing=full", "offload.checkpoints=host")
    exact, caching = (
        tiers(capsys, *offload, f"host.pinned={each}")[0] for each in ("exact", "caching")
    )
    assert exact["consumers"] == caching["consumers"] == {"saved": exact["needed_bytes"]}
    # Checkpoints of 3 blocks, 2 x 64 tokens of 64 elements in fp32, are powers of two already.
    assert caching["needed_bytes"] == exact["needed_bytes"] == 4 * 3 * 2**15
    uneven = (*offload, "model.hidden_size=48")
    assert tiers(capsys, *uneven)[0]["needed_bytes"] == 4 * 3 * 2**15
    assert tiers(capsys, *uneven, "host.pinned=exact")[0]["needed_bytes"] == 9 * 2**15


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("host.pinned=expandable", "host.pinned: 'expandable' must be 'caching' or 'exact'"),
        ("host.setup=all", "host.setup: 'all' must be 'sharded', 'one_rank' or 'every_rank'"),
    ],
)
def test_a_use_of_host_memory_that_is_none_is_refused_in_a_line(
    capsys: pytest.CaptureFixture[str], setting: str, said: str
) -> None:
    assert answer(["run", "tiny", "--set", setting]) == 2
    assert capsys.readouterr().err == f"zsim: tiny: {said}\n"
