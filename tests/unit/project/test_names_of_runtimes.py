"""Only the folder of a runtime spells its name; only calibration and data spell a GPU profile's."""

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import zsim_topologies
from zsim.runtimes.lookup import file_keys, part, runtimes, search_of
from zsim.strategy.runtime_options import names

ROOT = Path(__file__).parents[3]
RUNTIMES = ROOT / "runtimes"
CALIBRATION = ROOT / "zsim" / "calibration"
FILES = sorted([*(ROOT / "zsim").rglob("*.py"), *(ROOT / "backends").rglob("*.py")])

CEILING = 0
"""Most string constants outside these folders that spell a name."""


def constants(text: str) -> Iterator[str]:
    """Yield the string constants of a module without its docstrings."""
    nodes = list(ast.walk(ast.parse(text)))
    documentation = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if not isinstance(node, ast.Constant) or id(node) in documentation:
            continue
        if isinstance(node.value, str):
            yield node.value


def spelled(pattern: re.Pattern[str], *, outside: Path) -> list[str]:
    """Return the constants with a match, each with its file; parse only files that have one."""
    return [
        f"{path.relative_to(ROOT)}: {value!r}"
        for path in FILES
        if not path.is_relative_to(outside) and pattern.search(text := path.read_text("utf-8"))
        for value in constants(text)
        if pattern.search(value)
    ]


def words(names: Iterable[str]) -> str:
    return "|".join(map(re.escape, sorted(names)))


def test_no_module_outside_the_runtimes_spells_the_name_of_one() -> None:
    pattern = re.compile(rf"(?<![a-z0-9])({words(names())})(?![a-z0-9])", re.IGNORECASE)
    found = spelled(pattern, outside=RUNTIMES)
    assert len(found) <= CEILING, found


def test_no_module_outside_calibration_and_data_spells_the_name_of_a_gpu_profile() -> None:
    profiles = {*zsim_topologies.kernel_profiles(), *zsim_topologies.profiles()} - {"unnamed"}
    quoted = re.compile(rf"[\"']({words(profiles)})[\"']")
    found = [
        f"{path.relative_to(ROOT)}: {value!r}"
        for path in FILES
        if not path.is_relative_to(CALIBRATION) and quoted.search(text := path.read_text("utf-8"))
        for value in constants(text)
        if value in profiles
    ]
    assert len(found) <= CEILING, found


def test_a_name_in_a_key_is_found_and_one_in_a_docstring_is_not() -> None:
    text = '"""About fsdp2."""\nKEY = "zero.fsdp2.offload_policy"\n'
    assert list(constants(text)) == ["zero.fsdp2.offload_policy"]


def test_each_part_of_a_runtime_that_is_given_as_text_can_be_imported() -> None:
    assert {"deepspeed_config", "torchtitan_config"} <= {*file_keys()}
    for name, each in runtimes().items():
        config = each.config
        assert search_of(name) is not None
        parts = [each.schedule, each.volume, each.need, config.write, *config.readers.values()]
        parts += [kind.write for kind in config.kinds]
        assert all(callable(part(value, name="part")) for value in parts if value is not None)
