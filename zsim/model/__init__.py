"""The model that is trained: units of parameters and segments, kernels, and shapes."""
