"""Searches for settings, and their answers as values that print themselves."""
