"""Processes that compute for this one, and limits of what runs take."""
