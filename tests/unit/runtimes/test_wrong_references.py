"""A package of somebody else whose references name nothing: one line says which, and what to do."""

import shutil
from pathlib import Path

import pytest
from other_package import answers, install_plant

RUN = (
    "check",
    "tiny",
    *("--set", "zero.stage=3", "--set", "zero.emulate=mine"),
    *("--set", "zero.bucket_elements=500_000_000"),
)
BEST = ("best", "gpt2", "--gpus", "8xh100", "--runtime", "mine", "--workers", "1")
READ = (*RUN[:-4], "--set", "zero.mine_file='mine.json'")
INIT, ENTRIES = "mine_runtime/__init__.py", "runtime-1.0.dist-info/entry_points.txt"

WRONG = {
    "a name of a module": (
        (INIT, "fsdp2.dispatch:volume", "fsdp2.dispatch:volum"),
        RUN,
        "zsim.runtimes: mine.volume: 'zsim_runtimes.fsdp2.dispatch:volum': "
        "zsim_runtimes.fsdp2.dispatch has no volum; did you mean volume?",
    ),
    "a module": (
        (INIT, "fsdp2.dispatch:schedule", "fsdp2.none:schedule"),
        RUN,
        "zsim.runtimes: mine.schedule: 'zsim_runtimes.fsdp2.none:schedule': there is no module "
        "zsim_runtimes.fsdp2.none; correct the name, or install its package",
    ),
    "options as text": (
        (INIT, "options=Mine", 'options="mine_runtime.options:Mine"'),
        RUN,
        "zsim.runtimes: mine.options: 'mine_runtime.options:Mine' must be a subclass of "
        "RuntimeOptions; import the class",
    ),
    "a file of host costs": (
        (INIT, "host_costs.toml", "costs.toml"),
        (*RUN, "--set", "compute.profile=h100"),
        "zsim.runtimes: mine.host_costs: 'mine_runtime:costs.toml': there is no such file; "
        "write package:file",
    ),
    "a reader": (
        (INIT, "mine_runtime.config:read", "mine_runtime.config:reed"),
        READ,
        "zsim.runtimes: mine.config.readers.mine_file: 'mine_runtime.config:reed': "
        "mine_runtime.config has no reed; did you mean read?",
    ),
    "a search space": (
        (INIT, "mine_runtime.search:SEARCH", "mine_runtime search"),
        BEST,
        "zsim.runtimes: mine.search: 'mine_runtime search' must be module:name",
    ),
    "an entry point": (
        (ENTRIES, ":RUNTIME", ":RUNTIM"),
        RUN,
        "zsim.runtimes: mine: 'mine_runtime:RUNTIM': mine_runtime has no RUNTIM; "
        "did you mean Runtime?",
    ),
    "a backend": (
        (ENTRIES, "mine = ", "[zsim.backends]\nmine = "),
        ("run", "tiny", "--backend", "mine"),
        "backend 'mine': its class attribute traits must be a BackendTraits",
    ),
    "a command": (
        (ENTRIES, "[zsim.runtimes]\nmine = mine_runtime:R", "[zsim.commands]\nmine = mine:R"),
        ("mine",),
        "zsim.commands: mine: 'mine:RUNTIME': there is no module mine; "
        "correct the name, or install its package",
    ),
}


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Return a folder with the package as an installer leaves it."""
    return install_plant(tmp_path / "site", "runtime")


@pytest.mark.matrix(3)
@pytest.mark.parametrize(("change", "words", "line"), WRONG.values(), ids=WRONG.keys())
def test_a_reference_that_names_nothing_is_refused_in_one_line(
    site: Path, change: tuple[str, str, str], words: tuple[str, ...], line: str
) -> None:
    name, old, new = change
    file = site / name
    text = file.read_text("utf-8")
    assert old in text
    file.write_text(text.replace(old, new), "utf-8")
    shutil.rmtree(site / "mine_runtime" / "__pycache__", ignore_errors=True)
    (site / "mine.json").write_text("{}", "utf-8")
    words = tuple(each.replace("'mine.json'", f"'{site / 'mine.json'}'") for each in words)
    (refused,) = answers(site, words)
    assert refused == (2, "", f"zsim: {line}\n")


def test_a_package_that_a_module_needs_is_named_as_before(site: Path) -> None:
    (site / "mine_runtime" / "search.py").write_text("import nowhere_installed\n", "utf-8")
    (refused,) = answers(site, BEST)
    assert "nowhere_installed" in refused.stderr
