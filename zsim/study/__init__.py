"""What-if studies: one question, many runs. A file is read, expanded into runs, and judged.

Pure: `zsim.workers` finds what a study names, runs it and keeps what comes out.
"""
