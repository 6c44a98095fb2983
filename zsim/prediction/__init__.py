"""From a scenario to a prediction, and how far to trust it."""
