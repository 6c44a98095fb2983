"""Constants of GPUs and networks by name, and the files that they stand in."""
