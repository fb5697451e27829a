"""The command ``keepstep``."""
