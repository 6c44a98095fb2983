"""How a model is sharded and trained: stages, knobs, optimizers, options of runtimes."""
