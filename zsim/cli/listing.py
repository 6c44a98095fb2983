"""`zsim list`."""

from zsim.cli.option import Code
from zsim.cli.printing import print_answer


def list_() -> Code:
    """List scenarios, studies, topologies and backends."""
    from zsim.api.shipped import installed

    print_answer(installed(), as_json=False)
    return Code.DONE
