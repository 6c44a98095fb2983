"""What-if studies: one question, many runs. Read a study file, expand it into runs, rank the runs.

This package does no I/O: `zsim.workers` reads files, runs the simulations and stores the outcomes.
"""
