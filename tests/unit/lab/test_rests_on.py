"""Every fitted constant names its publications; docs/evidence.md lists those of a single one."""

from fit_sources import rests_on

from zsim.files.installed import fitted_kernels, network_profiles
from zsim.runtimes.lookup import host_costs_of, runtimes

HOSTS = {name: host_costs_of(name).rests_on for name in runtimes()}


def test_every_group_of_constants_names_a_publication() -> None:
    assert all(rests_on(fitted_kernels().values(), network_profiles().values(), HOSTS).values())


def test_a_constant_of_two_publications_names_both() -> None:
    found = rests_on(fitted_kernels().values(), network_profiles().values(), HOSTS)
    assert len(found["kernels alone, h100"]) > 1
    assert len(found["network, h100"]) > 1
