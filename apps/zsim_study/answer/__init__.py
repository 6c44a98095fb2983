"""Results of sweeps as values that print themselves."""
