"""What operations cost in time on a GPU, each formula with its source."""
