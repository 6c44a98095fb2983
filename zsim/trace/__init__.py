"""What happened in a run, and its form in files of PyTorch's profiler."""
