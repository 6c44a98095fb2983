"""Runs of training that others published: what they were, and how far predictions are off."""
