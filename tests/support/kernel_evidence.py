"""Errors that constants of kernels ship as evidence."""

from collections.abc import Iterator

from zsim.cluster.profile.in_training import Evidence
from zsim.files.installed import fitted_kernels

ROUNDED = 5.1e-5
"""Errors ship with four digits after the point."""


def own_evidence() -> Iterator[Evidence]:
    """Yield the evidence of each GPU whose constants were judged by runs of its own."""
    for gpu, fitted in fitted_kernels().items():
        evidence = fitted.constants.training.evidence
        if evidence is not None and evidence.gpu == gpu:
            yield evidence
