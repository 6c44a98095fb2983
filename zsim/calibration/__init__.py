"""Constants from published measurements, and predictions beside them."""
