"""Algorithms of collectives: bytes on links, and hops."""
