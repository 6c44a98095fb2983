"""Start, join, watch and end the processes of ranks, and diagnose their failures."""
