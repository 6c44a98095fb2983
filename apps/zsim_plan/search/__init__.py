"""The search for the best setting: the candidates, their bounds, and the order of trials."""
