"""`zsim largest SCENARIO`."""

from zsim.cli.option import Code, Json, Scenario, Settings


def largest(scenario: Scenario, settings: Settings = None, json: Json = False) -> Code:
    """The largest model that fits, and what stops the next one."""
    from zsim.cli.largest import print_largest
    from zsim.files.source import Changes

    found = print_largest(scenario, Changes(settings=tuple(settings or ())), as_json=json)
    return Code.DONE if found else Code.NO
