"""Section on the settings of a run: the command, and every scenario key with its origin."""

import json
from collections.abc import Sequence

from zsim.report.page import PageTable, Section, words

SettingRow = tuple[str, object, str]
"""A key, its value and its origin."""


def settings_section(
    command: str, rows: Sequence[SettingRow], *, changed: Sequence[str]
) -> Section:
    """Return the section of the run of `command`, with all its keys and the `changed` ones."""
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
                (words(key), words(_shown(value)), words(origin)) for key, value, origin in rows
            ),
        ),
    )


def _shown(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)
