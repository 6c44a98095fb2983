"""Runtimes that zsim emulates."""
