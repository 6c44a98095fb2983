"""Happens-before of streams and threads, and what memory demands of it. No module imports torch."""
