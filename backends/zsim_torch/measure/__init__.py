"""Times of kernels, collectives, operations, drives and copies on the ranks at hand."""
