"""Measure kernels, collectives, operations, drives and copies on the ranks of this machine."""
