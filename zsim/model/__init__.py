"""What is trained: units of parameters and segments, kernels, and shapes to build them from."""
