"""Equivalent ranks and links, which are simulated once."""
