"""Backends: jobs that they are given, the protocol they follow, values that a run carries."""
