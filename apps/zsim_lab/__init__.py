"""Predictions compared with published measurements: `zsim validate` and `zsim calibrate`."""
