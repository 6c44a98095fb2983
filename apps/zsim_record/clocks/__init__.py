"""Happens-before order of streams and threads, and data race detection. Does not import torch."""
