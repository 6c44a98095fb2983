"""Runtimes that zsim emulates: one folder each, found by its entry point."""
