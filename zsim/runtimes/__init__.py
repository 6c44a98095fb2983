"""Runtimes that zsim emulates, and zsim's own stages beside them."""
