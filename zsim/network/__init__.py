"""Collectives: a group and a cluster in, bytes per link and latency steps out."""
