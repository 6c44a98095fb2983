"""The simulated host and streams of each rank class, and the records that they produce."""
