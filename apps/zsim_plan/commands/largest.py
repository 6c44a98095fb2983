"""`zsim largest SCENARIO`."""

from zsim.cli.option import Code, Json, Scenario, Settings
from zsim.cli.printing import print_answer
from zsim.cli.progress_bar import progress


def largest(scenario: Scenario, settings: Settings = None, json: Json = False) -> Code:
    """Find the largest model that fits, and what stops the next one."""
    from zsim_plan.answer.largest_result import largest as largest_of

    with progress(f"the largest model of {scenario}") as update:
        found = largest_of(scenario, settings, progress=update)
    print_answer(found, as_json=json)
    return Code.DONE if found.fits else Code.NO
