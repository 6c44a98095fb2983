"""What `zsim run` says of memory that a host would take if it never waited."""

import pytest

from zsim.shell.cli import answer


def test_a_host_that_runs_ahead_of_memory_is_said_to_wait(
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings = ("zero.emulate=fsdp1", "zero.fsdp1.limit_all_gathers=false", "model.layers=40")
    assert answer(["run", "llama2_7b", *(f"--set={each}" for each in settings)]) == 0
    fits = " ".join(capsys.readouterr().out.split())
    assert "fits yes: the host would run ahead to 10" in fits
