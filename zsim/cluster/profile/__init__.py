"""Constants of GPUs and networks by name, and their files."""
