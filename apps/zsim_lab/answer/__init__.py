"""Answers of `zsim validate` and `zsim calibrate` as values that print themselves."""
