"""`zsim compare A B`."""

from typing import Annotated

import typer

from zsim.cli.option import Code, Json, Settings, scenario_names, setting_keys


def compare(
    first: Annotated[
        str,
        typer.Argument(
            metavar="A",
            help="A scenario, schedule or trace (FILE.json).",
            show_default=False,
            autocompletion=scenario_names,
        ),
    ],
    second: Annotated[
        str | None,
        typer.Argument(
            metavar="B",
            help="Another; without it A again.",
            show_default=False,
            autocompletion=scenario_names,
        ),
    ] = None,
    settings: Settings = None,
    but: Annotated[
        list[str] | None,
        typer.Option(
            "--but",
            metavar="KEY=VALUE",
            help="Change B alone. Many are allowed.",
            autocompletion=setting_keys,
        ),
    ] = None,
    json: Json = False,
) -> Code:
    """Two runs side by side, the largest difference first."""
    from zsim.cli.comparing import Request, compare_runs

    compare_runs(
        Request(
            first=first,
            second=second,
            settings=tuple(settings or ()),
            but=tuple(but or ()),
            as_json=json,
        )
    )
    return Code.DONE
