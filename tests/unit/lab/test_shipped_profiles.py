"""The profiles of networks that ship are what `zsim calibrate` makes of the tables they name.

The tables do not come with zsim: with `ZSIM_MEASURED=DIR`, a folder of them, `make test-long` fits
them again, which takes some minutes.
"""

import os
from pathlib import Path

import pytest

from zsim.cluster.profile.files import Profiles
from zsim.files.installed import fitted_kernels, network_profiles
from zsim_lab.fit.network_profiles import calibrated, nearest_kind
from zsim_lab.rows.measurements import all_tables, timed_links

MEASURED = os.environ.get("ZSIM_MEASURED", "")


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not MEASURED, reason="ZSIM_MEASURED names no folder of published tables")
def test_profiles_that_ship_are_calibrated_again() -> None:
    folder = Path(MEASURED)
    networks, _ = all_tables(folder)
    rows = [row for found, _ in networks.values() for row in found]
    made = {each.gpu: each for each in calibrated(rows, links=timed_links(folder), report=print)}
    shipped = network_profiles()
    assert made.keys() == shipped.keys()
    for gpu, again in made.items():
        assert words_of(again) == words_of(shipped[gpu])
        for system in (None, *shipped[gpu].systems):
            assert again.of(system).numbers == pytest.approx(
                shipped[gpu].of(system).numbers, rel=1e-3
            ), f"{gpu}/{system}"
        assert again.errors == pytest.approx(shipped[gpu].errors, abs=1e-4), gpu


def words_of(profiles: Profiles) -> tuple[object, ...]:
    return profiles.publications, profiles.fabrics, profiles.scaled_from, set(profiles.systems)


def test_constants_that_a_gpu_borrows_are_those_of_the_gpu_its_file_names() -> None:
    scaled = [each for each in network_profiles().values() if not each.publications]
    assert scaled
    for each in scaled:
        assert each.scaled_from == nearest_kind(each.gpu) == fitted_kernels()[each.gpu].sibling
