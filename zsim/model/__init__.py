"""The trained model: units of parameters and segments, kernels, and shapes."""
