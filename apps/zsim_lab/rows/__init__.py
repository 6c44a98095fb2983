"""Published measurements, read from tables."""
