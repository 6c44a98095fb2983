"""What a schedule runs on: GPUs, links, profiles with constants, and files that describe them."""
