"""Record one rank of a script in this process; started by `zsim record`."""

import sys

from zsim_record.record.script_process import main

if __name__ == "__main__":
    main(sys.argv[1:])
