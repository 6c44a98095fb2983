"""Lower bounds of the step time of a setting, valid for every schedule of it."""
