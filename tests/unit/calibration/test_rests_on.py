"""Every fitted constant names its publications, and the page names those that have one alone."""

import re
from pathlib import Path

from rests_on import rests_on

from zsim.files.installed import fitted_kernels, network_profiles

PAGE = Path(__file__).parents[3] / "docs" / "validation.md"


def test_constants_that_rest_on_one_publication_are_those_that_the_page_names() -> None:
    found = rests_on(fitted_kernels().values(), network_profiles().values())
    assert all(found.values())
    alone = {name: of[0] for name, of in found.items() if len(of) == 1}
    text = PAGE.read_text("utf-8").partition("## Constants of one publication")[2]
    section = text.partition("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \| (.+?) \|$", section, re.MULTILINE)
    assert dict(rows[2:]) == alone


def test_a_constant_of_two_publications_names_both() -> None:
    found = rests_on(fitted_kernels().values(), network_profiles().values())
    assert len(found["kernels alone, h100"]) > 1
    assert len(found["network, h100"]) > 1
