"""docs/reference/not_modelled.md lists the refusals of the code."""

import pytest
from generated_sections import sections
from refusals_page import COMMAND, PAGE, makers, of_runtime

from zsim_runtimes.deepspeed.options import DeepSpeed
from zsim_runtimes.fsdp1.options import FSDP1

SECTIONS = dict(sections(PAGE.read_text("utf-8")))


def test_every_section_is_made_from_the_code() -> None:
    assert list(SECTIONS) == list(makers())


@pytest.mark.matrix(4)
@pytest.mark.parametrize("name", makers())
def test_a_section_lists_what_the_code_refuses(name: str) -> None:
    assert SECTIONS[name] == makers()[name](), f"run: {COMMAND}"


def test_a_combination_that_is_newly_refused_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert of_runtime("fsdp1") == SECTIONS["fsdp1"], f"run: {COMMAND}"
    monkeypatch.setattr(FSDP1, "has_replicas", False)
    line = "| `parallel.replicate=2` |  | `parallel.replicate: 2 is not modelled for FSDP1` |"
    assert set(of_runtime("fsdp1").splitlines()) - set(SECTIONS["fsdp1"].splitlines()) == {line}


def test_a_refusal_that_is_lifted_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeepSpeed, "has_replicas", True)
    lifted = set(SECTIONS["deepspeed"].splitlines()) - set(of_runtime("deepspeed").splitlines())
    line = "| `parallel.replicate=2` |  | `parallel.replicate: 2 is not modelled for DeepSpeed` |"
    assert line in lifted
