"""A fixture for tests of training code: `pytest -p zsim_record.record.pytest_fixture`.

A test with the argument `stream_recording` runs on the pretended device, and fails if its streams
race.
"""

from collections.abc import Iterator

import pytest

from zsim_record.record.finding_report import ScriptRecording, document_of
from zsim_record.record.recording import recording
from zsim_record.record.tape import Tape


@pytest.fixture
def stream_recording(request: pytest.FixtureRequest) -> Iterator[Tape]:
    """Record the test; `@pytest.mark.parametrize("stream_recording", [8], indirect=True)`.

    The parameter is the number of ranks; the default is 8.
    """
    with recording(world=getattr(request, "param", 8)) as tape:
        yield tape
    found = ScriptRecording([document_of(tape)])
    if not found.is_clean:
        pytest.fail(found.text(), pytrace=False)
