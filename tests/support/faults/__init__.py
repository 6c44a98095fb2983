"""Faults to plant: in schedules, in the executor, in recorded traces, and who has to find each.

`table` has all of them, `judge` says of one whether it is found, and `python -m faults.rotation`
prints how many commits pass until the tests have planted each.
"""
