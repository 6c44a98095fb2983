"""Errors of predictions, from published runs and their predictions."""
