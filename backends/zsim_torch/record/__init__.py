"""Records what a training script does to streams and memory of a pretended accelerator."""
