"""Traces of runs, and their conversion to files of PyTorch's profiler and of Chakra."""
