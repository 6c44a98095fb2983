"""The bound of a group has the memory of its lightest setting, and a time of one that may run."""

from zsim_plan.answer.setting_bound import SettingBound, lightest_bound

LIGHT = SettingBound(step_time_s=3.0, memory_bytes=40)
FULL = SettingBound(why_not="needs more device memory", is_full=True)


def test_a_group_runs_if_its_lightest_setting_fits() -> None:
    assert lightest_bound(FULL, [LIGHT]) == LIGHT
    assert lightest_bound(FULL, [FULL]) == FULL


def test_a_bound_of_time_is_never_that_of_a_setting_that_has_none() -> None:
    """Settings that surely do not fit with enough room get no bound of time."""
    unsure = SettingBound(memory_bytes=80, is_unsure=True)
    assert lightest_bound(unsure, [LIGHT]) == LIGHT


def test_the_default_keeps_its_time_where_another_setting_keeps_less_memory() -> None:
    default = SettingBound(step_time_s=2.0, memory_bytes=50)
    found = lightest_bound(default, [LIGHT, FULL])
    assert (found.step_time_s, found.memory_bytes, found.is_unsure) == (2.0, 40, False)
