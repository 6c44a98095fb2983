"""Figures of schedules and traces: time, memory, differences, what fits, and what would help."""
