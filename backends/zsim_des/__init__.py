"""Simulates schedules on a cluster by events, with SimPy."""

from zsim_des.simulation import SimBackend

__all__ = ["SimBackend"]
