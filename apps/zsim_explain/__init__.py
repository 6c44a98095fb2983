"""Answers about recorded training steps: `zsim explain`."""
