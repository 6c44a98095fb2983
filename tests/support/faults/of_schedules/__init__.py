"""Operators on schedules, by what they change."""
