"""Checkpoints of a training in the format of torch.distributed.checkpoint."""
