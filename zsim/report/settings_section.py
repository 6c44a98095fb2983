"""What ran: the command, and every key of the scenario with what set it."""

import json
from collections.abc import Sequence

from zsim.report.page import PageTable, Section, words
from zsim.scenario.settled_keys import Origin, SettledKey

RANK = {Origin.CHANGED: 0, Origin.SCENARIO: 1, Origin.DEFAULT: 2}


def settings_section(command: str, keys: Sequence[SettledKey]) -> Section:
    """Return the section of a run that `command` makes; keys that were changed come first."""
    changed = [each.key for each in keys if each.origin is Origin.CHANGED]
    what = f"Changed: {', '.join(changed)}." if changed else "Nothing was changed in the scenario."
    return Section(
        title="What ran",
        sentences=(what,),
        code=command,
        folded="every key",
        table=PageTable(
            columns=("key", "value", "set by"),
            numeric=(False, False, False),
            rows=tuple(
                (words(each.key), words(_shown(each.value)), words(each.origin))
                for each in sorted(keys, key=lambda each: RANK[each.origin])
            ),
        ),
    )


def _shown(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)
