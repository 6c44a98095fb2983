"""Ranks and links that no one can tell apart, simulated once."""
