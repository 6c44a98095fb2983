"""Predictions beside published measurements: `zsim validate` and `zsim calibrate`."""
