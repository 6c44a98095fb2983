"""What-if studies: one question, many runs. A file is read, expanded into runs, and judged.

Pure: the shell finds what a study names, runs it, keeps what comes out, and prints it.
"""
