"""Convert recordings to schedules: the last step of a script in zsim's operations."""
