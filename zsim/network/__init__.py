"""Collectives: bytes per link and latency for a group on a cluster."""
