"""Constants fitted to published measurements."""
