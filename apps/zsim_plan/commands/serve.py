"""`zsim serve`."""

from typing import Annotated

import typer

from zsim.cli.option import Code, at_least

Port = Annotated[
    int,
    typer.Option(metavar="N", parser=at_least(0), help="Port on this machine; 0: any."),
]
Open = Annotated[
    bool, typer.Option("--open/--no-open", help="Open it in the browser, where there is a screen.")
]


def serve(port: Port = 8100, open_: Open = True) -> Code:
    """Choose model, GPUs and settings on a local page."""
    import webbrowser

    from zsim_plan.page.local_page import LocalServer, can_show

    server = LocalServer(port)
    print(f"{server.address} (for this machine alone; Ctrl+C ends it)", flush=True)
    if open_ and can_show():
        webbrowser.open(server.address)
    server.run()
    return Code.DONE
