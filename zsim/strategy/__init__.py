"""Strategies, by which a model is sharded and trained: stages, knobs, optimizers, runtimes."""
