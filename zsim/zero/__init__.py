"""Building blocks of ZeRO schedules; `own` composes them into zsim's own stages.

Each technique has its own file. Nothing here depends on a clock, a cluster or a number of ranks
other than the sizes of the mesh axes.
"""
