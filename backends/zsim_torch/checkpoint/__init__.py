"""Checkpoints of a training, as torch.distributed.checkpoint has them."""
