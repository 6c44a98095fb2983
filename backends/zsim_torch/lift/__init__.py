"""Recordings as schedules: what a script did in its last step, in zsim's own operations."""
