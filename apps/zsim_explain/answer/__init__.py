"""Explanations of traces."""
