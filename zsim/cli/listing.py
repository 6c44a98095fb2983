"""`zsim list`."""

from zsim.cli.answer import print_answer
from zsim.cli.option import Code


def list_() -> Code:
    """List scenarios, studies, topologies and backends."""
    from zsim.api.shipped import installed

    print_answer(installed(), as_json=False)
    return Code.DONE
