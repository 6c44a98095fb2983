"""Lower bounds of the time and memory of settings, from model and strategy alone."""
