"""Execute the program of one rank: memory, streams, collectives, kernels and optimizer."""
