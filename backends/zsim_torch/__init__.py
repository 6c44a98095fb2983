"""The real world: a schedule runs on real ranks through torch.distributed."""
