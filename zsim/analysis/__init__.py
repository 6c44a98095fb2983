"""Figures of schedules and traces: times, memory, differences, memory fit and its remedies."""
