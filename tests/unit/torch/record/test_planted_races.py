"""Bugs of released runtimes are found, and the same code mended has no finding."""

import pytest
import torch.distributed as dist
from planted_races import PLANTED, Planted

from zsim_torch import recording


def test_there_are_twenty() -> None:
    assert len(PLANTED) >= 20


@pytest.mark.parametrize(("kind", "bug"), PLANTED.values(), ids=PLANTED.keys())
def test_a_planted_bug_is_found_once_and_its_mended_version_is_clean(
    kind: str, bug: Planted
) -> None:
    with recording(world=8) as tape:
        dist.init_process_group("nccl")
        bug(False)
    assert [hazard.kind.value for hazard in tape.findings] == [kind]
    (hazard,) = tape.findings
    for access in (hazard.earlier, hazard.later):
        assert access.stack is not None
        assert bug.__name__ in {frame.function for frame in access.stack.frames}
    with recording(world=8) as tape:
        dist.init_process_group("nccl")
        bug(True)
    assert tape.findings == []
