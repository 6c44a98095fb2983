"""What tests of real ranks and recordings share in one process.

Autograd counts devices at the first backward of a process, so the pretended device of recordings
has to be known before any test here runs one.
"""

import gc

import pytest

from zsim_record.record.script_surroundings import register_device

register_device()


@pytest.fixture(scope="session", autouse=True)
def what_the_session_imported_is_no_garbage() -> None:
    """Recordings collect garbage; without this, they go through all that was imported."""
    gc.collect()
    gc.freeze()
