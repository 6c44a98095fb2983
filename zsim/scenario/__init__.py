"""Scenarios: the tables of a file, and what they mean: model, cluster, strategy, faults."""
