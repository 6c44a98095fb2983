"""A simulation-first testbed for ZeRO training: the pure core."""
