"""Runs of studies on processes and nodes, kept in a store."""
