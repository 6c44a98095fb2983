"""`python -m zsim.conformance NAME ...`: hold registered backends to the conformance suite."""

import os
import sys
from argparse import ArgumentParser
from pathlib import Path

from zsim.backend.backend import BackendError, load_backend


def main() -> int:
    """Test the backends that the command line names, and return the exit code of pytest."""
    parser = ArgumentParser(prog="python -m zsim.conformance", description=__doc__)
    parser.add_argument("names", nargs="+", metavar="NAME", help="a backend that is registered")
    names: list[str] = parser.parse_args().names
    try:
        import pytest  # noqa: PLC0415  (an extra: without it there is one line)
    except ModuleNotFoundError:
        parser.error("needs pytest: pip install 'zsim[conformance]'")
    try:
        for name in names:
            load_backend(name)
    except BackendError as error:
        parser.error(str(error))
    folder = Path(__file__).parent
    chosen = (f"--backend={name}" for name in names)
    # No configuration of the folder that it is called from, and nothing written next to the suite.
    alone = ("-c", os.devnull, "--rootdir", str(folder), "-p", "no:cacheprovider")
    return int(pytest.main([str(folder), "--import-mode=importlib", *alone, *chosen]))


if __name__ == "__main__":
    sys.exit(main())
