"""Errors of predictions, by published runs and what is predicted of them."""
