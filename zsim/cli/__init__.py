"""The command line: a file for each command, and how answers and errors are printed."""
