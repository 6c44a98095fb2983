"""One rank of a script, recorded in this process; `zsim record` starts it."""

import sys

from zsim_torch.record.script_process import main

if __name__ == "__main__":
    main(sys.argv[1:])
