"""The front door for Python: load a scenario, run, check, compare and sweep it.

`import zsim` has the functions under `zsim.load`, `zsim.run` and so on. The commands of `zsim` call
the same functions and print what they return.
"""
