"""Runs a schedule in the order of issue on exact numbers, all ranks of a role at once."""
