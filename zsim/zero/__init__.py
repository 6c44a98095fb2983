"""The techniques of ZeRO that schedules are composed of; `own` has zsim's own stages.

Each technique stands in its own file. Nothing here knows a clock, a cluster or a number of ranks
beyond the sizes of the axes.
"""
