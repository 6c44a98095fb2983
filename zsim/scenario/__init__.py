"""Scenarios: the tables of a file, and the model, cluster, strategy and faults they describe."""
