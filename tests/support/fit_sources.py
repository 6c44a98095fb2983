"""Publications that fitted constants depend on, to name constants with a single publication."""

from collections.abc import Iterable, Mapping

from zsim.cluster.profile.files import Profiles
from zsim.cluster.profile.kernels import FittedKernels
from zsim_lab.fit.constants import IN_TRAINING, IN_TRAINING_REST_ON
from zsim_lab.fit.training_fit import AS_ALONE


def rests_on(
    kernels: Iterable[FittedKernels],
    networks: Iterable[Profiles],
    hosts: Mapping[str, tuple[str, ...]],
) -> dict[str, tuple[str, ...]]:
    """Return the publications that each group of constants was fitted to, by name of the group.

    Constants that a profile takes from another one are named there. `hosts` are the publications of
    the host costs of each runtime.
    """
    found = {f"host, {name}": publications for name, publications in hosts.items() if publications}
    for each in kernels:
        if each.publications:
            found[f"kernels alone, {each.gpu}"] = each.publications
        evidence = each.constants.training.evidence
        if each.gpu in AS_ALONE:
            found[f"kernels in training, {each.gpu}"] = AS_ALONE[each.gpu]
        elif evidence is not None and evidence.gpu == each.gpu:
            found[f"kernels in training, {each.gpu}"] = evidence.publications
    for profiles in networks:
        if profiles.publications:
            found[f"network, {profiles.gpu}"] = profiles.publications
    for gpu, system in IN_TRAINING:
        found[f"network in training, {gpu}/{system}"] = IN_TRAINING_REST_ON
    return found
