"""Strategies that shard and train a model: stages, options, optimizers, runtimes."""
