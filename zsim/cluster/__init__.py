"""Clusters: GPUs, links, profiles with constants, and files that describe them."""
