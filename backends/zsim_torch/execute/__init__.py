"""Executes the program of one rank: memory, streams, collectives, kernels, optimizer."""
