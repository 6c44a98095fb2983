"""Simulates schedules on a cluster by events."""

from zsim_des.simulation import SimBackend

__all__ = ["SimBackend"]
