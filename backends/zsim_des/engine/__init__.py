"""The simulated host and streams of each rank class, and what they leave behind."""
