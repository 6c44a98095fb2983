"""The command line: one module per command, and the printing of answers and errors."""
