"""Fit constants to published measurements, and compare predictions with them."""
