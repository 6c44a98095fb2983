"""The public Python API: load a scenario, run, check, compare and sweep it.

`import zsim` exports these functions as `zsim.load`, `zsim.run` and so on. The `zsim` commands call
the same functions and print their results.
"""
