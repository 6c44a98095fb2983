"""The search for the best setting: which there are, which cannot win, which is tried next."""
