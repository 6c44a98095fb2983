"""Traces of runs, and their form in files of PyTorch's profiler."""
