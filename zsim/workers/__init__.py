"""Worker processes, and limits on the memory and time of runs."""
