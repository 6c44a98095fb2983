"""Schedules in JSON on the command line: checked, run, and refused in one line."""

import json
from pathlib import Path

import pytest
from command_answers import Ask, Json, answered, planted, refused


@pytest.mark.one_commit_in(6)
def test_a_schedule_written_by_plan_is_checked_and_run(ask: Ask, schedule: Path) -> None:
    assert answered(ask("check", schedule, "--json"))["findings"] == []
    assert answered(ask("run", schedule, "--json"))["fits"] is True


def test_a_schedule_gives_what_its_scenario_gives(ask: Ask, scenario: Path, schedule: Path) -> None:
    runs = [answered(ask("run", path, "--json")) for path in (scenario, schedule)]
    for run in runs:
        del run["wall_time_s"], run["title"]
    assert runs[0] == runs[1]


def test_findings_are_printed_and_exit_code_1(ask: Ask, schedule: Path) -> None:
    def forget_a_free(data: Json) -> None:
        step = data["schedule"]["programs"][0]["step"]
        del step[next(i for i, each in enumerate(step) if each["type"] == "Free")]

    planted(schedule, forget_a_free)
    code, out, error = ask("check", schedule, "--json")
    assert (code, error) == (1, "")
    findings = json.loads(out)["findings"]
    assert findings
    assert set(findings[0]) == {"invariant", "where", "why"}
    for command in ("check", "run"):
        code, out, _ = ask(command, schedule)
        assert code == 1
        assert findings[0]["why"] in out
    code, out, _ = ask("check", schedule, "--explain", "1")
    assert code == 1
    assert findings[0]["where"] in out


def test_a_wrong_schedule_is_one_line_with_the_path_inside_it(ask: Ask, schedule: Path) -> None:
    def negative(data: Json) -> None:
        data["schedule"]["programs"][0]["buffers"][3]["elements"] = -3

    planted(schedule, negative)
    for command in ("check", "run"):
        line = refused(ask(command, schedule))
        assert line.startswith(f"{schedule}: schedule.programs[0].buffers[3]: buffer ")
        assert line.endswith("elements -3 must be >= 0")


def test_a_schedule_takes_no_settings_and_no_ranks(ask: Ask, schedule: Path) -> None:
    assert refused(ask("run", schedule, "--set", "zero.stage=1")).startswith("--set: ")
    assert refused(ask("run", schedule, "--ranks", "2")).startswith("--ranks: ")


@pytest.mark.one_commit_in(6)
def test_a_schedule_without_a_model_is_checked_but_not_run(ask: Ask, schedule: Path) -> None:
    planted(schedule, lambda data: data.pop("model"))
    assert ask("check", schedule)[0] == 0
    assert refused(ask("run", schedule)) == (
        f"{schedule}: model: missing; a run needs it, a check does not"
    )
