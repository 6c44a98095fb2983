"""`zsim largest`: its answer."""

from zsim.api.largest_result import largest
from zsim.api.scenario import find_scenario
from zsim.cli.answer import print_json, print_lines, print_title
from zsim.cli.spinner import spinner
from zsim.files.source import Changes


def print_largest(name: str, changes: Changes, *, as_json: bool) -> bool:
    """Print the largest model that fits; return whether there is one.

    Raises:
        MistakeError: `name` is no scenario, or cannot be used.
    """
    scenario = find_scenario(name).but(changes)
    with spinner(f"the largest model of {name}"):
        result = largest(scenario)
    if as_json:
        print_json(result.to_dict())
    else:
        print_title(result.title)
        print_lines(result.facts())
    return result.fits
