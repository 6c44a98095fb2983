"""Time of operations on a GPU, each formula with its source."""
