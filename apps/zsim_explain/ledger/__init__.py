"""Ledgers of steps, and their differences."""
