"""Checkpoints on disk, in the format of `torch.distributed.checkpoint` (DCP): what they hold, written and read."""
