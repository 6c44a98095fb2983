"""Faults of the executor and of runtimes, by what they change."""
